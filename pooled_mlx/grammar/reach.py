"""Which definitions of a lowered schema are used, and which of them any finite value can meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pooled_mlx.grammar.nodes import KINDS, Node, kind_of, kinds_of, never
from pooled_mlx.grammar.refs import children

_CONTAINERS = frozenset({"object", "array"})


def reachable(root: Node, definitions: Mapping[str, Node]) -> set[str]:
    """The names of the definitions that `root` refers to, directly or not."""
    found: set[str] = set()
    waiting = list(_mentioned(root)) if definitions else []
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_mentioned(definitions[name]))
    return found


def close(root: Node, definitions: dict[str, Node], nodes: Iterable[dict[str, Any]]) -> Node:
    """Replace references that no finite value can meet by the false schema, in place; the same for `root`.

    A schema that requires itself would send the model round and round until its tokens end, and the engine takes a reference
    to a false schema for an error of the whole. `nodes` are all nodes of the result.
    """
    if definitions:
        met = _met(definitions)
        for node in nodes:
            reference = node.get("$ref")
            if reference is not None and name_of(reference) not in met:
                node.clear()
                node.update(never())
        for name in [name for name in definitions if name not in met]:
            definitions[name] = False
        return root if _meets(root, met) else False
    return root


def name_of(reference: str) -> str:
    """The name of the definition that a lowered `$ref` refers to."""
    return reference.rpartition("/")[2]


def _met(definitions: Mapping[str, Node]) -> set[str]:
    """The definitions that some finite value may meet: the least fixed point, by a work list."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, node in definitions.items():
        for used in _mentioned(node):
            users[used].append(name)
    met: set[str] = set()
    waiting = list(definitions)
    while waiting:
        name = waiting.pop()
        if name not in met and _meets(definitions[name], met):
            met.add(name)
            waiting.extend(users[name])
    return met


def _mentioned(node: Node) -> set[str]:
    found: set[str] = set()
    stack: list[Node] = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if "$ref" in part:
                found.add(name_of(part["$ref"]))
            stack.extend(child for _, child in children(part))
    return found


def _meets(node: Node, met: set[str]) -> bool:
    """True when some finite value may meet `node`, given the definitions that are known to be met."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and name_of(node["$ref"]) not in met:
        return False
    if not all(_meets(part, met) for part in node.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in node and not any(_meets(part, met) for part in node[key]):
            return False
    kinds = kinds_of(node["type"]) if "type" in node else KINDS
    for listed in ([node["const"]] if "const" in node else None, node.get("enum")):
        if listed is not None:
            kinds &= frozenset(map(kind_of, listed))
    if kinds - _CONTAINERS:
        return True
    return ("object" in kinds and _object_meets(node, met)) or ("array" in kinds and _array_meets(node, met))


def _object_meets(node: Mapping[str, Any], met: set[str]) -> bool:
    properties = node.get("properties", {})
    rest = node.get("additionalProperties", True) if "patternProperties" not in node else True
    return all(_meets(properties.get(name, rest), met) for name in node.get("required", ()))


def _array_meets(node: Mapping[str, Any], met: set[str]) -> bool:
    first = node.get("prefixItems", ())
    least = node.get("minItems", 0)
    if not all(_meets(part, met) for part in first[:least]):
        return False
    return least <= len(first) or _meets(node.get("items", True), met)
