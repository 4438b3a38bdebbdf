"""Exclusive bounds, written so that the grammar engine (1.9) gets them right.

Between an exclusive whole bound and a fraction in the same unit, away from zero, the engine accepts the bound itself: over 2
and up to 2.5 it takes 2. An inclusive bound a little further on is held exactly. "A little" is a billionth: less would need
more digits than the engine computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx.grammar.nodes import Node
from pooled_mlx.grammar.refs import children

_MOST_DECIMALS = 9
_SIGNIFICANT_DIGITS = 14
_INWARD = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}
_BOUNDS = ("minimum", "maximum", *_INWARD)


def settle_bounds(root: Node, definitions: Mapping[str, Node]) -> None:
    """Replace, in place, the exclusive bounds of a lowered schema that the engine would not hold."""
    bounded: list[dict[str, Any]] = []
    stack: list[Node] = [root, *definitions.values()]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        seen.add(id(node))
        if any(key in node for key in _BOUNDS):
            bounded.append(node)
        stack.extend(child for _, child in children(node))
    fractions = any(node[key] != node[key] // 1 for node in bounded for key in _BOUNDS if key in node)
    if not fractions:
        return
    for node in bounded:
        for key, (inclusive, direction) in _INWARD.items():
            bound = node.get(key)
            if bound is not None and bound == bound // 1 and bound * direction >= 0 and node.get("type") != "integer":
                _replace(node, key, inclusive, direction)


def _replace(node: dict[str, Any], key: str, inclusive: str, direction: int) -> None:
    bound = int(node[key])
    decimals = min(_MOST_DECIMALS, _SIGNIFICANT_DIGITS - len(str(abs(bound))))
    if decimals < 1:
        return
    del node[key]
    inward = float(f"{'-' if direction < 0 else ''}{abs(bound)}.{'0' * (decimals - 1)}1")
    other = node.get(inclusive)
    node[inclusive] = inward if other is None else max(other, inward) if direction > 0 else min(other, inward)
