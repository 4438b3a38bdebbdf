"""The menu as a value, and its rendering as text. Nothing here knows how a Mac draws it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the menu.

    `id` is what `MenuModel.act` takes; it stays the same while the text changes. An item without an action is shown grey.
    """

    id: str
    text: str
    action: bool = True
    checked: bool = False
    children: tuple[Item, ...] = ()

    @property
    def separator(self) -> bool:
        """True for the line between two groups."""
        return not self.text


def line(name: str) -> Item:
    """A separator; `name` keeps its id unique."""
    return Item(f"line.{name}", "", action=False)


@dataclass(frozen=True, slots=True)
class Menu:
    """What stands in the menu bar (`title`) and what opens below it."""

    title: str
    items: tuple[Item, ...]

    def find(self, item_id: str) -> Item | None:
        """The item of that id, in sub-menus too."""
        return next((item for item in self.walk() if item.id == item_id), None)

    def walk(self) -> Iterator[Item]:
        """Every item, each before its children."""
        waiting = list(reversed(self.items))
        while waiting:
            item = waiting.pop()
            yield item
            waiting.extend(reversed(item.children))


def render_text(menu: Menu) -> str:
    """The menu as text, as the documentation shows it: grey lines in brackets, marks as ✓, sub-menus indented."""
    width = max((len(text) for text in _lines(menu.items, 0)), default=0)
    width = max(width, len(menu.title) + 2)
    rows = [f"┌─ {menu.title} {'─' * (width - len(menu.title) - 1)}┐"]
    rows += [
        f"├{'─' * (width + 2)}┤" if text == "" else f"│ {text}{' ' * (width - len(text))} │" for text in _lines(menu.items, 0)
    ]
    rows.append(f"└{'─' * (width + 2)}┘")
    return "\n".join(rows)


def _lines(items: tuple[Item, ...], depth: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if item.separator:
            lines.append("")
            continue
        mark = "✓ " if item.checked else "  "
        text = item.text if item.action or item.children else f"[{item.text}]"
        lines.append(f"{mark}{'    ' * depth}{text}{' ▸' if item.children else ''}")
        lines += _lines(item.children, depth + 1)
    return lines
