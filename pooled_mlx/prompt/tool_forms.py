"""One serialisation per tool set: a client that lists the same tools in another order gets the prompt it had before."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pooled_mlx.core.request import Tool
from pooled_mlx.prompt.conversation import listing
from pooled_mlx.prompt.defuse import property_names, strings_in

BUDGET_BYTES = 32 << 20
_ENTRY_BYTES = 600


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A tool set as it is rendered: `tools` in the order and with the property order of the prompt and of the grammar,
    `listing` for the template (never changed), `clean` when no text in it needs hiding."""

    tools: tuple[Tool, ...] = ()
    listing: tuple[dict[str, Any], ...] = ()
    clean: bool = True
    digest: bytes = b""


class ToolForms:
    """Tool set -> the form in which it was seen first, the least recently used forgotten first. Safe to use from any thread.

    Two sets are the same when their tools are equal but for the order of tools and of keys. `strict` is not rendered and has
    no influence. `is_clean` and `is_clean_name` say whether a text and a name can go through a template as they are.
    """

    def __init__(
        self, is_clean: Callable[[str], bool], is_clean_name: Callable[[str], bool], budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._is_clean = is_clean
        self._is_clean_name = is_clean_name
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self._forms: OrderedDict[bytes, tuple[ToolForm, int]] = OrderedDict()
        self._lock = threading.Lock()

    def form(self, tools: Sequence[Tool]) -> ToolForm:
        """The form of a tool set, with the `strict` of this request."""
        if not tools:
            return ToolForm()
        texts = sorted(_canonical(tool) for tool in tools)
        key = hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._forms.get(key)
            if known is not None:
                self._forms.move_to_end(key)
        form = known[0] if known is not None else self._new(tools, key, sum(map(len, texts)))
        strict = {tool.name: tool.strict for tool in tools}
        return replace(form, tools=tuple(replace(tool, strict=strict[tool.name]) for tool in form.tools))

    def _new(self, tools: Sequence[Tool], key: bytes, characters: int) -> ToolForm:
        listed = tuple(listing(tools))
        names = [name for tool in tools for name in (tool.name, *property_names(tool.parameters))]
        clean = all(map(self._is_clean, strings_in(listed))) and all(map(self._is_clean_name, names))
        form = ToolForm(tuple(tools), listed, clean, key)
        cost = _ENTRY_BYTES + 8 * characters
        with self._lock:
            held = self._forms.get(key)
            if held is not None:
                return held[0]
            if cost <= self.budget_bytes:
                self._forms[key] = (form, cost)
                self.bytes += cost
                while self.bytes > self.budget_bytes:
                    self.bytes -= self._forms.popitem(last=False)[1][1]
        return form


def _canonical(tool: Tool) -> str:
    grammar = [tool.grammar.syntax, tool.grammar.definition] if tool.grammar else None
    fields = [tool.name, tool.description, tool.parameters, tool.custom, tool.namespace, grammar]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
