"""JSON schema → the part of it that the grammar engine enforces exactly, and a list of the rest."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pooled_mlx.grammar import isolated, lint, match
from pooled_mlx.grammar.errors import SchemaError, Unenforced
from pooled_mlx.grammar.lowering import Check, Lowering
from pooled_mlx.grammar.nodes import Node, never
from pooled_mlx.grammar.numbers import settle_bounds
from pooled_mlx.grammar.plain import stripped
from pooled_mlx.grammar.reach import close, reachable

_EXAMINE_SECONDS = 4.0
_TOO_LARGE = "with all that it is combined with it makes too large a grammar"
_MANY_NODES = 500
_MANY_DEFINITIONS = 100
_REASONS = (
    ("coerce_one_of", "two of its alternatives may hold at once"),
    ("are not disjoint", "two of its patterns can match one name"),
    ("panic", _TOO_LARGE),
    ("too large", _TOO_LARGE),
    ("too many", _TOO_LARGE),
    ("too big", _TOO_LARGE),
    ("items; max is", _TOO_LARGE),
    ("fuel", _TOO_LARGE),
)
_INTERNAL = re.compile(r"json-schema:|\$defs/d\d|::|assertion|option")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema that the grammar engine takes as it is: local `$defs` only, no annotation, false where nothing fits.

    `schema` is self-contained. `unenforced` lists what it does not hold. `has_open_names`: some object lists properties and
    takes others too, so that a listed name must not be spelled in another way (with `\\u0061`), as one of the others.
    """

    schema: Mapping[str, Any]
    unenforced: tuple[Unenforced, ...] = ()
    has_open_names: bool = False


def lower(
    schema: Mapping[str, Any] | bool, *, strict: bool, where: str = "", tool: bool = False, verify: bool | None = None
) -> Lowered:
    """Lower one schema; `where` is its own JSON pointer, for messages.

    `strict`: a keyword that cannot be enforced is a `SchemaError`; without it the keyword is dropped and listed. `tool`: what
    tool schemas are forgiven (oneOf is anyOf, tuples in items). `verify` None has the engine look at every format, and at a
    tool only where the look could take long; such looks happen in a process of their own.

    Raises `SchemaError`: broken schemas, caps, schemas that no finite value meets.
    """
    if tool and not verify and (plain := stripped(schema)) is not None and plain is not False:
        return Lowered({} if plain is True else plain)
    lowering = Lowering(schema, strict=strict, where=where, tool=tool)
    root = close(lowering.run(), lowering.definitions, lowering.nodes)
    if lowering.bounds:
        settle_bounds(root, lowering.definitions)
    if lowering.multiples:
        lint.check_multiples(root, lowering.definitions, where)
    slow = (lowering.patterns > 0 and lowering.joined) or len(lowering.definitions) > _MANY_DEFINITIONS
    if verify or (verify is None and (slow or not tool)):
        root = _verified(lowering, root, apart=slow or lowering.joined or lowering.count > _MANY_NODES)
    if root is False or root == never():
        raise SchemaError(where, "", "no finite value can meet this schema")
    named = (*lowering.unenforced, *lowering.annotations)
    return Lowered(_whole(root, lowering.definitions), named, not tool and any(map(_is_open, lowering.nodes)))


def _is_open(node: Node) -> bool:
    if isinstance(node, bool) or node.get("additionalProperties") is False:
        return False
    return bool(node.get("properties") or node.get("patternProperties"))


def _verified(lowering: Lowering, root: Node, *, apart: bool) -> Node:
    """`root` after the engine has accepted it; what it refuses is named, and dropped unless strict."""
    problem = _problem(root, lowering, apart)
    if not problem:
        return root
    until = time.monotonic() + _EXAMINE_SECONDS
    checks = sorted(lowering.checks, key=lambda check: check.rank)
    for check in checks:
        if isolated.is_hopeless(problem) or time.monotonic() > until:
            break
        _examine(check, lowering, apart, until)
    root = close(root, lowering.definitions, lowering.nodes)
    problem = _problem(root, lowering, apart)
    if match.is_unsatisfiable(problem):
        return False
    # No part is too much alone: leave out the largest ones, until the rest can be held.
    checks.sort(key=lambda check: len(str(check.node)))
    while problem and checks and not isolated.is_hopeless(problem) and time.monotonic() < until:
        check = checks.pop()
        if check.node and check.node != never():
            _leave_out(check, lowering, problem)
            root = close(root, lowering.definitions, lowering.nodes)
            problem = _problem(root, lowering, apart)
    if problem:
        lowering.relaxed(lowering.where, "schema", plain_reason(problem))
        return True
    return root


def _examine(check: Check, lowering: Lowering, apart: bool, until: float) -> None:
    while check.node and (problem := _problem(check.node, lowering, apart)):
        if match.is_unsatisfiable(problem):
            check.node.clear()
            check.node.update(never())
            close(True, lowering.definitions, lowering.nodes)
            return
        if not _leave_out(check, lowering, problem) or isolated.is_hopeless(problem) or time.monotonic() > until:
            return


def _leave_out(check: Check, lowering: Lowering, problem: str) -> bool:
    """Name what `check` drops and drop it. False when it had nothing left to drop. Raises `SchemaError` when strict."""
    before = dict(check.node)
    keyword, pointer = check.keyword, check.pointer
    if check.keywords:
        keyword = check.keywords.pop()
        pointer = f"{pointer}/{keyword}"
    if all((item.pointer, item.keyword) != (pointer, keyword) for item in lowering.unenforced):
        lowering.relaxed(pointer, keyword, plain_reason(problem))
    check.drop()
    return check.node != before


def plain_reason(problem: str) -> str:
    """What the engine says, in words for people who have never heard of it: no advice about it, no names of its own."""
    if isolated.is_hopeless(problem):
        return problem
    for sign, reason in _REASONS:
        if sign in problem:
            return reason
    return "the grammar engine cannot hold it" if _INTERNAL.search(problem) else problem


def _problem(node: Node, lowering: Lowering, apart: bool) -> str:
    """What the engine says about one node; "" where it takes it."""
    if isinstance(node, bool) or not node or node == never():
        return ""
    text = json.dumps(_whole(node, lowering.definitions), ensure_ascii=False)
    grammar = f"%llguidance {{}}\nstart: %json {text}\n"
    return match.first_line(isolated.check(grammar)) if apart else match.check_grammar(grammar)


def _whole(root: Node, definitions: Mapping[str, Node]) -> Mapping[str, Any]:
    if isinstance(root, bool):
        return {} if root else never()
    needed = reachable(root, definitions)
    return {**root, "$defs": {name: definitions[name] for name in definitions if name in needed}} if needed else root


__all__ = ["Lowered", "SchemaError", "Unenforced", "lower", "plain_reason"]
