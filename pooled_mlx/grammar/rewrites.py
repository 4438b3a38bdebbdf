"""Alternatives and conditions, written with what the grammar engine has, where that is exact and bounded.

Each public function is a `keywords.Keyword`; what it cannot write goes through `Lowering.relaxed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pooled_mlx.grammar import values
from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.nodes import MAX_ALTERNATIVES, Inexact, Node, intersection, is_false
from pooled_mlx.grammar.refs import escape

if TYPE_CHECKING:
    from pooled_mlx.grammar.lowering import Lowering, Place


def either(lowering: Lowering, listed: Sequence[Node], out: dict[str, Any]) -> Sequence[Node]:
    """`anyOf` over lowered schemas, written into `out` where there is room."""
    if any(item is True for item in listed):
        return ()
    left = [item for item in listed if not is_false(item)]
    if len(left) < 2:
        return left or [False]
    if "anyOf" in out:
        return [lowering.keep({"anyOf": left})]
    out["anyOf"] = left
    return ()


def any_of(nodes: Sequence[Node]) -> Node:
    """`nodes.union` without flattening: some of `nodes` may still be incomplete."""
    if any(node is True for node in nodes):
        return True
    left = [node for node in nodes if not is_false(node)]
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def one_of(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    """Exactly one alternative: each of them without the others. In tools: at least one.

    Only what the schema around it leaves counts: alternatives that tell objects apart by a tag overlap in everything else.
    """
    inner = place.down("oneOf")
    listed = values.schemas(value, "oneOf", place)
    nodes = [lowering.node(item, inner.beside(str(index))) for index, item in enumerate(listed)]
    if lowering.tool or len(nodes) == 1:
        return either(lowering, nodes, out)

    allowed = lowering.kinds_here(schema)
    required = [name for name in values.list_at(schema, "required") if isinstance(name, str)]

    def compute() -> Node:
        try:
            return _exactly_one(lowering, nodes, allowed, required)
        except Inexact:
            # the engine may still see that they are disjoint; if it does not, `loosen` is called and the keyword named
            return {"oneOf": [node for node in nodes if not is_false(node)]}

    def loosen(node: dict[str, Any]) -> None:
        node.clear()
        either(lowering, nodes, node)

    return [lowering.hole(compute, place.at("oneOf"), "oneOf", drop=loosen)]


def _exactly_one(lowering: Lowering, nodes: Sequence[Node], allowed: frozenset[str], required: Sequence[str]) -> Node:
    alternatives: list[Node] = []
    excluded = 0
    apart = lowering.algebra.disjoint
    for index, node in enumerate(nodes):
        others = [other for at, other in enumerate(nodes) if at != index and not apart(node, other, allowed, required)]
        excluded += len(others)
        if excluded > MAX_ALTERNATIVES:
            raise Inexact("too many of its alternatives overlap")
        kinds = lowering.algebra.kinds(node) & allowed
        alternatives.append(intersection([node, *(lowering.algebra.complement(other, kinds) for other in others)]))
    return any_of(alternatives)


def not_(lowering: Lowering, value: Any, schema: Mapping[str, Any], _o: dict[str, Any], place: Place) -> Sequence[Node]:
    """The complement of the schema inside."""
    inner = lowering.node(value, place.down("not"))
    kinds = lowering.kinds_here(schema)
    return [lowering.hole(lambda: lowering.algebra.complement(inner, kinds), place.at("not"), "not")]


def if_(lowering: Lowering, value: Any, schema: Mapping[str, Any], _o: dict[str, Any], place: Place) -> Sequence[Node]:
    """The condition with `then`, or its complement with `else`."""
    condition = lowering.node(value, place.down("if"))
    then = lowering.node(schema.get("then", True), place.down("then"))
    other = lowering.node(schema.get("else", True), place.down("else"))
    if then is True and other is True:
        return ()
    kinds = lowering.kinds_here(schema)

    def compute() -> Node:
        outside = lowering.algebra.complement(condition, kinds)
        return any_of([intersection([condition, then]), intersection([outside, other])])

    return [lowering.hole(compute, place.at("if"), "if")]


def dependent_required(
    lowering: Lowering, value: Any, _s: Mapping[str, Any], _o: dict[str, Any], place: Place
) -> Sequence[Node]:
    """For each name: it is absent, or the names it needs are there."""
    found: list[Node] = []
    for name, needed in values.mapping(value, "dependentRequired", place).items():
        if not isinstance(needed, list) or not all(isinstance(item, str) for item in needed):
            at = f"{place.at('dependentRequired')}/{escape(name)}"
            raise SchemaError(at, "dependentRequired", f"dependentRequired lists property names, not {needed!r:.60}")
        if needed:
            found.append(_unless_present(lowering, name, {"required": list(dict.fromkeys([*needed, name]))}))
    return found


def dependent_schemas(
    lowering: Lowering, value: Any, _s: Mapping[str, Any], _o: dict[str, Any], place: Place
) -> Sequence[Node]:
    """For each name: it is absent, or the schema holds."""
    inner = place.down("dependentSchemas")
    found: list[Node] = []
    for name, item in values.mapping(value, "dependentSchemas", place).items():
        needed = values.list_at(item, "required") if isinstance(item, Mapping) else []
        if isinstance(item, Mapping) and "$ref" not in item and all(isinstance(one, str) for one in needed):
            item = {**item, "required": [*needed, name]}  # it is there where this counts, and other names cannot be it
        found.append(_unless_present(lowering, name, lowering.node(item, inner.beside(escape(name)))))
    return found


def dependencies(lowering: Lowering, value: Any, schema: Mapping[str, Any], o: dict[str, Any], place: Place) -> Sequence[Node]:
    """The form of drafts 3 to 7, each entry one of the two. Later drafts forgot it; who writes it means it."""
    entries = values.mapping(value, "dependencies", place)
    lists = {name: item for name, item in entries.items() if isinstance(item, list)}
    others = {name: item for name, item in entries.items() if not isinstance(item, list)}
    return [*dependent_required(lowering, lists, schema, o, place), *dependent_schemas(lowering, others, schema, o, place)]


def _unless_present(lowering: Lowering, name: str, node: Node) -> Node:
    absent = lowering.keep({"properties": {name: False}})
    if node is True or is_false(node):
        return True if node is True else absent
    return lowering.keep({"anyOf": [absent, node]})
