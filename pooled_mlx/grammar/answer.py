"""From a request to the grammar of its answer: what must be held, in the words of the model's chat format."""

from __future__ import annotations

import hashlib
import json
import marshal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

from pooled_mlx.core.errors import ApiError, bad_request
from pooled_mlx.core.request import CustomGrammar, Request, Tool
from pooled_mlx.grammar import isolated, lint
from pooled_mlx.grammar.errors import SchemaError, Unenforced
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import CompiledGrammar, Compiler, GrammarRefused, GrammarTokenizer, first_line
from pooled_mlx.grammar.memo import Memo
from pooled_mlx.grammar.plain import stripped
from pooled_mlx.grammar.schema import lower, plain_reason
from pooled_mlx.grammar.spec import AnswerSpec

_TOOLS = "/tools/"
_SEARCH_SECONDS = 15.0
_MOST_JSON_LEVELS = 128
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class AnswerFormat(Protocol):
    """What this module needs of a chat format; `chat_formats.base.ChatFormat` is one."""

    @property
    def tags(self) -> frozenset[str]:
        """The spellings that are tags where the model has them as tokens."""
        ...

    def grammar(self, spec: Any, lark: Any) -> str:
        """The Lark text for one answer; `spec` is an `AnswerSpec`, `lark` a `LarkBuilder`."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of one answer.

    `text` is None where the request needs none. `compiled` is set where a `Compiler` was given. `unenforced` are the keywords
    of a format that nothing enforces, as ASCII text for a header. `warnings` are for the log and name tool and keyword.
    """

    text: str | None
    unenforced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    compiled: CompiledGrammar | None = None


def needs_grammar(request: Request) -> bool:
    """True when the answer has a form to hold: a format, calls that may be made, or calls that must not be made."""
    return request.response_format.kind != "text" or bool(request.tools) or any(turn.tool_calls for turn in request.turns)


def answer_grammar(
    request: Request,
    chat_format: AnswerFormat,
    tokens: GrammarTokenizer | Compiler,
    tools: Sequence[Tool] | None = None,
    *,
    reasoning_open: bool = False,
) -> AnswerGrammar:
    """The grammar for the answer to `request`; CPU work, not for the event loop.

    `tools` are the request's tools in the order of the prompt (default: as sent). With a `Compiler` the grammar is compiled,
    and a tool whose rules the engine refuses loses them alone. Requests that ask for the same get the same object from a
    bounded memory. Raises `ApiError` (400): a format that is broken, over a limit, or strict and not enforceable.
    """
    if not needs_grammar(request):
        return AnswerGrammar(None)
    listed = request.tools if tools is None else tuple(tools)
    key = _key(request, listed, reasoning_open, chat_format, tokens.memo)
    known = tokens.memo.get(key)
    if isinstance(known, AnswerGrammar):
        if known.compiled is not None and isinstance(tokens, Compiler):
            tokens.renew(known.compiled)
        return known
    names = {tool.name for tool in request.callable_tools}
    offered = tuple(tool for tool in listed if tool.name in names)
    made = _make(request, chat_format, tokens, offered, reasoning_open)
    tokens.memo.put(key, made, len(made.text or ""))
    return made


def _make(
    request: Request, chat_format: AnswerFormat, tokens: GrammarTokenizer | Compiler, offered: tuple[Tool, ...], open_: bool
) -> AnswerGrammar:
    tokenizer = tokens.tokenizer if isinstance(tokens, Compiler) else tokens
    degraded: dict[str, str] = {}
    dropped: list[Unenforced] = []
    for index, tool in enumerate(offered):
        _check_size(tool, index)
        _look_at(tool, degraded, dropped)
    form = request.response_format
    spec = AnswerSpec(
        request=request,
        tools=offered,
        reasoning_open=open_,
        may_think=request.thinking.on and not open_,
        json_schema=_ANY_OBJECT if form.kind == "json_object" else form.schema if form.kind == "json_schema" else None,
        markers=chat_format.tags & tokenizer.added.keys(),
        degraded=degraded,
    )
    strict = form.kind == "json_schema" and form.strict
    if offered and request.tool_choice.mode in ("required", "named") and spec.json_schema is not None:
        _check_format(spec.json_schema, strict)  # no rule will be written for it, and it is wrong all the same
    work = _Work(spec, chat_format, tokenizer, strict=strict)
    try:
        lark = work.write(spec)
    except RecursionError:
        spec = replace(spec, tools=tuple(_shallow(tool, spec.degraded) for tool in offered))
        work = _Work(spec, chat_format, tokenizer, strict=strict)
        lark = work.write(spec)
    compiled = None
    if isinstance(tokens, Compiler):
        try:
            compiled = tokens.compile(work.text)
        except GrammarRefused as refusal:
            spec = work.degrade(tokens, refusal)
            lark = work.write(spec)
            compiled = tokens.compile(work.text)
    held = [*work.given_up, *(item for item in lark.unenforced if not item.pointer.startswith(_TOOLS))]
    warnings = _warnings(spec, [*dropped, *lark.unenforced])
    return AnswerGrammar(work.text, tuple(map(_header, held)), tuple(warnings), compiled)


class _Work:
    """One grammar in the making."""

    def __init__(self, spec: AnswerSpec, chat_format: AnswerFormat, tokenizer: GrammarTokenizer, *, strict: bool) -> None:
        self._spec = spec
        self._format = chat_format
        self._tokenizer = tokenizer
        self._strict = strict
        self.text = ""
        self.given_up: list[Unenforced] = []
        """The format as a whole, where this model's vocabulary makes too much of its grammar."""

    def write(self, spec: AnswerSpec) -> LarkBuilder:
        """Write the grammar of `spec` into `text`. Raises `ApiError` for a format that cannot be held."""
        lark = LarkBuilder(self._tokenizer.added, strict=self._strict)
        try:
            self.text = self._format.grammar(spec, lark)
        except SchemaError as error:
            raise _format_refused(error) from error
        size = len(self.text.encode())
        if size > lint.MAX_GRAMMAR_BYTES:
            raise bad_request(
                f"The tools and formats of this request make a grammar of {size} bytes (limit {lint.MAX_GRAMMAR_BYTES}). "
                "Send fewer or smaller tools.",
                "tools",
            )
        return lark

    def degrade(self, compiler: Compiler, refusal: GrammarRefused) -> AnswerSpec:
        """The spec without what the engine refuses: a format that is not strict, and tools, found by halves (few out of many).

        Raises `ApiError` for a strict format, and where nothing helps.
        """
        spec = self._spec
        until = time.monotonic() + _SEARCH_SECONDS
        if spec.json_schema is not None and self._refused(compiler, ()):
            reason = plain_reason(refusal.reason)
            if self._strict:
                raise bad_request(f"The schema of response_format cannot be compiled: {reason}.", "response_format")
            self.given_up.append(Unenforced("", "schema", reason))
            is_object = isinstance(spec.json_schema, Mapping) and spec.json_schema.get("type") == "object"
            spec = self._spec = replace(spec, json_schema=_ANY_OBJECT if is_object else True)
            if not self._refused(compiler, spec.tools):
                return spec
        waiting = [spec.tools] if spec.tools else []
        while waiting:
            part = waiting.pop()
            if time.monotonic() > until:
                raise bad_request(f"The grammar of the tools takes too long to compile: {refusal.reason}.", "tools")
            reason = self._refused(compiler, part)
            if not reason:
                continue
            if len(part) == 1:
                spec.degraded[part[0].name] = reason
            else:
                waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
        if not spec.degraded or self._refused(compiler, spec.tools):
            raise bad_request(f"The grammar of this request cannot be compiled: {plain_reason(refusal.reason)}.", "tools")
        return spec

    def _refused(self, compiler: Compiler, tools: tuple[Tool, ...]) -> str:
        self.write(replace(self._spec, tools=tools))
        try:
            compiler.compile(self.text)
        except GrammarRefused as refusal:
            return refusal.reason
        return ""


def _check_format(schema: Mapping[str, Any] | bool, strict: bool) -> None:
    try:
        lower(schema, strict=strict)
    except SchemaError as error:
        raise _format_refused(error) from error


def _format_refused(error: SchemaError) -> ApiError:
    return bad_request(
        f"The schema of response_format cannot be used: {error.pointer or '#'}: {error.message}.", "response_format"
    )


def _check_size(tool: Tool, index: int) -> None:
    if tool.parameters is None or isinstance(tool.parameters, bool) or _is_small(tool.parameters):
        return
    try:
        size = len(json.dumps(tool.parameters, ensure_ascii=False, separators=(",", ":")))
    except RecursionError:
        return  # far too deep for any use: see `_shallow`
    if size > lint.MAX_TOOL_SCHEMA_CHARACTERS:
        limit = lint.MAX_TOOL_SCHEMA_CHARACTERS
        raise bad_request(
            f"The schema of tool {tool.name!r} has {size} characters (limit {limit}). Send a smaller one.", f"tools[{index}]"
        )


def _look_at(tool: Tool, degraded: dict[str, str], dropped: list[Unenforced]) -> None:
    """Find what is wrong with a tool's schema and what cannot be enforced, whatever its format makes of it."""
    if tool.custom:
        reason = _grammar_problem(tool.grammar)
        if reason:
            degraded[tool.name] = reason
        return
    if tool.parameters is None or stripped(tool.parameters) is not None:
        return
    try:
        lowered = lower(tool.parameters, strict=False, where=_TOOLS + tool.name, tool=True)
    except SchemaError as error:
        degraded[tool.name] = str(error)
    except RecursionError:
        return  # see `_shallow`
    else:
        dropped.extend(lowered.unenforced)


def _grammar_problem(grammar: CustomGrammar | None) -> str:
    """Why the grammar of a custom tool cannot be used; "" where it can, or where there is none."""
    if grammar is None:
        return ""
    if grammar.syntax == "lark":
        problem = isolated.check(f"%llguidance {{}}\nstart: %lark {{\n{grammar.definition}\n}}\n")
        return f"its Lark grammar cannot be compiled: {first_line(problem)}" if problem else ""
    try:
        lower({"type": "string", "pattern": grammar.definition}, strict=True)
    except SchemaError as error:
        return f"its regular expression cannot be used: {error.message}"
    return ""


def _is_small(schema: Mapping[str, Any]) -> bool:
    """True for a schema whose JSON cannot reach the cap: no value takes more than four times what it takes in binary."""
    try:
        return len(marshal.dumps(dict(schema), 2)) <= lint.MAX_TOOL_SCHEMA_CHARACTERS // 4
    except ValueError:
        return False


def _shallow(tool: Tool, degraded: dict[str, str]) -> Tool:
    """The tool, without its schema where that is nested deeper than any schema that could be held."""
    level: list[Any] = [tool.parameters]
    for _ in range(_MOST_JSON_LEVELS):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if not level:
        return tool
    degraded[tool.name] = f"its schema is nested more than {_MOST_JSON_LEVELS} levels deep"
    return replace(tool, parameters=_ANY_OBJECT)


def _key(request: Request, tools: tuple[Tool, ...], reasoning_open: bool, chat_format: AnswerFormat, memo: Memo) -> bytes:
    """Everything that the grammar depends on, and descriptions: equal requests are what is looked for."""
    choice, form = request.tool_choice, request.response_format
    parts = [
        type(chat_format).__module__,
        (choice.mode, choice.name, choice.allowed, request.call_limit, reasoning_open, request.thinking.on),
        (form.kind, form.strict, form.schema),
    ]
    return _digest(parts) + memo.digest_of(tools, _digest_of_tools)


def _digest_of_tools(tools: tuple[Tool, ...]) -> bytes:
    return _digest(
        [
            (tool.name, tool.parameters, tool.custom, tool.grammar and (tool.grammar.syntax, tool.grammar.definition))
            for tool in tools
        ]
    )


def _digest(parts: list[Any]) -> bytes:
    try:
        data = marshal.dumps(parts, 2)
    except ValueError:  # a mapping that is no dict, or nesting beyond what marshal takes
        try:
            data = json.dumps(parts, default=dict).encode()
        except (RecursionError, TypeError, ValueError) as error:
            raise bad_request("A schema of this request is nested too deep, or no JSON.", "tools") from error
    return hashlib.blake2b(data, digest_size=20).digest()


def _header(item: Unenforced) -> str:
    return f"{item.keyword} at #{quote(item.pointer, safe='/$~')}"


def _warnings(spec: AnswerSpec, unenforced: Iterable[Unenforced]) -> list[str]:
    """One line for each tool whose schema is held in part or not at all."""
    dropped: dict[str, dict[tuple[str, str], str]] = {}
    for item in unenforced:
        if item.pointer.startswith(_TOOLS):
            name, _, pointer = item.pointer.removeprefix(_TOOLS).partition("/")
            dropped.setdefault(name, {}).setdefault((pointer, item.keyword), item.why)
    found = [
        f"tool {name!r}: its schema is not used, its calls keep name and shape only: {reason}"
        for name, reason in spec.degraded.items()
    ]
    for name, parts in dropped.items():
        if name not in spec.degraded:
            named = "; ".join(f"{keyword} at /{pointer} ({why})" for (pointer, keyword), why in parts.items())
            found.append(f"tool {name!r}: not enforced: {named}")
    return found
