"""Lowers one schema document: every keyword is enforced by the grammar engine, rewritten into keywords that are, or named."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.grammar import lint
from pooled_mlx.grammar.complement import Algebra
from pooled_mlx.grammar.errors import SchemaError, Unenforced
from pooled_mlx.grammar.keywords import KEYWORDS
from pooled_mlx.grammar.nodes import KINDS, Inexact, Node, is_false, kind_of, kinds_of, never
from pooled_mlx.grammar.refs import Document, Remote, Target
from pooled_mlx.grammar.values import json_type

_DIALECT = re.compile(r"https?://json-schema\.org/(?:draft/(2020-12|2019-09)/schema|(draft-0[467])/schema)#?$")
_LONE_REFERENCES = ("draft-04", "draft-06", "draft-07")
"""Drafts in which nothing beside a `$ref` counts."""

_TARGET = "#/$defs/"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the document the lowering stands."""

    pointer: str
    base: str
    depth: int

    def down(self, step: str) -> Place:
        """The place of a sub-schema at `step` below this one."""
        return Place(f"{self.pointer}/{step}", self.base, self.depth + 1)

    def beside(self, step: str) -> Place:
        """The place of one of several sub-schemas listed here, which count as one level together."""
        return Place(f"{self.pointer}/{step}", self.base, self.depth)

    def at(self, keyword: str) -> str:
        """The pointer of a keyword of the schema here."""
        return f"{self.pointer}/{keyword}"


@dataclass(slots=True)
class Check:
    """A part of the result that the grammar engine may still refuse; `drop` takes it out.

    Where it is dropped bit by bit, from the last one, `keywords` are those of the bits. `rank` sorts inner parts before outer
    ones, so that a refusal is named where it arises.
    """

    node: dict[str, Any]
    pointer: str
    keyword: str
    drop: Callable[[], None]
    rank: tuple[bool, int]
    keywords: list[str] = field(default_factory=list)


class Lowering:
    """One document on its way. `run` once; then `unenforced`, `definitions`, `nodes` and `checks` belong to the result.

    `annotations` are those words of the schema that JSON schema itself gives no force, but that somebody may count on.
    `count` is the number of nodes read, `multiples` that of multipleOf, `bounds` that of exclusive bounds, `patterns` that of
    regular expressions. `joined` tells whether something is intersected: the engine proves then that an intersection is not
    empty, which can take for ever.
    """

    def __init__(self, root: Any, *, strict: bool, where: str, tool: bool) -> None:
        self.strict = strict
        self.where = where
        self.tool = tool
        self.document = Document(root, where)
        self.draft = "2020-12"
        self.unenforced: list[Unenforced] = []
        self.annotations: list[Unenforced] = []
        self.definitions: dict[str, Node] = {}
        self.checks: list[Check] = []
        self.nodes: list[dict[str, Any]] = []
        self.count = 0
        self.multiples = 0
        self.bounds = 0
        self.patterns = 0
        self.joined = False
        self.algebra = Algebra(self.resolved, self.settle)
        self._names: dict[str, str] = {}
        self._waiting: deque[tuple[str, Target]] = deque()
        self._holes: dict[int, Callable[[], None]] = {}
        self._relaxed: set[int] = set()
        self._in_definition = False

    def run(self) -> Node:
        """The lowered root. Raises `SchemaError`."""
        root = self.document.root
        if isinstance(root, Mapping):
            self._read_dialect(root)
        lowered = self.node(root, Place(self.where, "", 0))
        self._in_definition = True
        while self._waiting:
            name, target = self._waiting.popleft()
            self.definitions[name] = self.node(target.schema, Place(target.pointer, target.base, 0))
        for key in list(self._holes):
            self._fill(key)
        return lowered

    # --- one schema

    def node(self, schema: Any, place: Place) -> Node:
        """The lowered form of one sub-schema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(place.pointer, "", f"a schema is an object or a boolean, not {json_type(schema)}")
        lint.check_depth(place.depth, place.pointer)
        self.add_nodes(1)
        if "$ref" in schema and self.document.lone_references:
            schema = {"$ref": schema["$ref"]}
        if "$id" in schema:
            place = Place(place.pointer, self.document.base_of(schema, place.base), place.depth)
        out: dict[str, Any] = {}
        more: list[tuple[str, Node]] = []
        was = len(self.unenforced)
        for key, value in schema.items():
            lower = KEYWORDS.get(key)
            if lower is not None:
                more.extend((key, item) for item in lower(self, value, schema, out, place))
        if any(is_false(item) for _, item in more):
            return False
        parts = [(key, item) for key, item in more if not isinstance(item, bool)]
        if not out and len(parts) == 1:
            out = parts[0][1]
        elif parts:
            self.joined = True
            out["allOf"] = [item for _, item in parts]
            keys = [key for key, _ in parts]
            rank = (not self._in_definition, -place.pointer.count("/"))
            self.checks.append(Check(out, place.pointer, "allOf", lambda: _drop_last(out), rank, keys))
        elif not out:
            return True
        self.keep(out)
        if len(self.unenforced) > was:
            self._relaxed.add(id(out))
        return out

    def add_nodes(self, count: int) -> None:
        """Count what was read of the document. Raises `SchemaError` over the cap."""
        self.count += count
        lint.check_nodes(self.count, self.where)

    def keep(self, node: dict[str, Any]) -> dict[str, Any]:
        """Remember a node of the result: some are completed or replaced in place at the end."""
        self.nodes.append(node)
        return node

    def kinds_here(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """A superset of the kinds that the schema around a keyword leaves."""
        found = KINDS
        types = schema.get("type")
        if isinstance(types, str) or (isinstance(types, list) and all(isinstance(name, str) for name in types)):
            found = kinds_of(types)
        if isinstance(schema.get("enum"), list):
            found &= frozenset(map(kind_of, schema["enum"]))
        if "const" in schema:
            found &= {kind_of(schema["const"])}
        return found

    # --- references

    def reference(self, value: Any, place: Place, *, keyword: str = "$ref") -> Node:
        """A `$ref` to a definition of the result, or what stands for it."""
        if not isinstance(value, str):
            raise SchemaError(place.at(keyword), keyword, f"{keyword} is a string, not {json_type(value)}")
        try:
            target = self._find(value, keyword, place)
        except Remote as reason:
            return self.relaxed(place.at(keyword), keyword, str(reason))
        if isinstance(target.schema, bool):
            return target.schema
        if not isinstance(target.schema, Mapping):
            raise SchemaError(place.at(keyword), keyword, f"the target {value[:100]!r} is no schema")
        name = self._names.get(target.pointer)
        if name is None:
            name = self._names[target.pointer] = f"d{len(self._names)}"
            self._waiting.append((name, target))
        return self.keep({"$ref": _TARGET + name})

    def target(self, value: str, keyword: str, place: Place) -> tuple[Any, Place]:
        """The schema, as written, that a reference leads to. Raises `Inexact` where it leads out of the document."""
        try:
            target = self._find(value, keyword, place)
        except Remote as reason:
            raise Inexact(str(reason)) from reason
        return target.schema, Place(target.pointer, target.base, 0)

    def _find(self, value: str, keyword: str, place: Place) -> Target:
        find = self.document.resolve if keyword == "$ref" else self.document.resolve_dynamic
        return find(value, place.base, place.at(keyword))

    def resolved(self, reference: str) -> Node:
        """The lowered schema of a reference. Raises `Inexact` while it is not there yet."""
        name = reference.removeprefix(_TARGET)
        if name not in self.definitions:
            raise Inexact("it refers to a schema that is not complete")
        return self.definitions[name]

    # --- what cannot be decided at once

    def hole(
        self,
        compute: Callable[[], Node],
        pointer: str,
        keyword: str,
        *,
        drop: Callable[[dict[str, Any]], None] = dict.clear,
    ) -> dict[str, Any]:
        """A schema that `compute` gives once all references are known; all values where that raises `Inexact`.

        `drop` makes it more lenient where the engine refuses what was computed.
        """
        node = self.keep({})
        in_definition = self._in_definition

        def fill() -> None:
            self._in_definition = in_definition
            try:
                found = compute()
            except Inexact as reason:
                self.relaxed(pointer, keyword, str(reason))
                return
            node.update(found if isinstance(found, dict) else {} if found else never())
            self.check(node, pointer, keyword, lambda: drop(node))

        self._holes[id(node)] = fill
        self.bounds += 1  # a complement may write some
        return node

    def settle(self, node: dict[str, Any]) -> None:
        """Complete `node` if it is a hole. Raises `Inexact` where it stands for more than what was asked."""
        self._fill(id(node))
        if id(node) in self._relaxed:
            raise Inexact("a part of it is not enforced")

    def _fill(self, key: int) -> None:
        fill = self._holes.pop(key, None)
        if fill is not None:
            self._relaxed.add(key)  # whoever asks for it while it is being computed asks in a circle
            was = len(self.unenforced)
            fill()
            if len(self.unenforced) == was:
                self._relaxed.discard(key)

    # --- what is not enforced

    def relaxed(self, pointer: str, keyword: str, why: str) -> Node:
        """The schema of all values, in the place of what cannot be enforced. Raises `SchemaError` when strict."""
        if self.strict:
            raise SchemaError(pointer, keyword, f"{keyword} cannot be enforced here: {why}")
        self.unenforced.append(Unenforced(pointer, keyword, why))
        return True

    def annotated(self, pointer: str, keyword: str, why: str) -> None:
        """Name what JSON schema takes for an annotation: accepted, strict or not."""
        self.annotations.append(Unenforced(pointer, keyword, why))

    def check(self, node: dict[str, Any], pointer: str, keyword: str, drop: Callable[[], None]) -> None:
        """Have the engine look at `node` once the document is complete."""
        rank = (not self._in_definition, -pointer.count("/"))
        self.checks.append(Check(node, pointer, keyword, drop, rank))

    def _read_dialect(self, root: Mapping[str, Any]) -> None:
        dialect = root.get("$schema")
        if dialect is None:
            return
        known = _DIALECT.match(dialect) if isinstance(dialect, str) else None
        if known is None:
            self.relaxed(f"{self.where}/$schema", "$schema", f"the dialect {str(dialect)[:100]!r} is not known")
        else:
            self.draft = known[1] or known[2]
            self.document.lone_references = self.draft in _LONE_REFERENCES


def _drop_last(node: dict[str, Any]) -> None:
    left = node.pop("allOf", [])[:-1]
    if left:
        node["allOf"] = left
