"""The grammars of one model: from a request to a compiled grammar for its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pooled_mlx.chat_formats.base import AnswerSpec, ChatFormat
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Request, Tool
from pooled_mlx.grammar.lark import LarkBuilder, SchemaError
from pooled_mlx.grammar.match import CompiledGrammar, Compiler, GrammarRefused, GrammarTokenizer

_log = logging.getLogger("pooled.grammar")


class Grammars:
    """Makes and compiles answer grammars. Safe to use from any worker thread."""

    def __init__(self, tokenizer: GrammarTokenizer, chat_format: ChatFormat) -> None:
        self._tokenizer, self._format = tokenizer, chat_format
        self._compiler = Compiler(tokenizer)

    @classmethod
    def load(cls, folder: Path, chat_format: ChatFormat, *, n_vocab: int, eos_ids: Sequence[int]) -> Grammars | None:
        """The grammars of a model folder; None, with a warning, when its tokenizer cannot be used for any.

        Takes seconds for a large vocabulary.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            return cls(GrammarTokenizer(text, n_vocab=n_vocab, eos_ids=eos_ids), chat_format)
        except Exception as error:
            _log.warning("%s cannot be used with grammars (%s): calls are not held to their schemas", path, error)
            return None

    def compile(
        self, request: Request, tools: tuple[Tool, ...], *, reasoning_open: bool
    ) -> tuple[CompiledGrammar | None, tuple[str, ...]]:
        """The grammar of a request's answer, None where it needs none, and what that grammar does not enforce.

        `tools` are the request's tools in the order of the prompt. Raises `ApiError` (400).
        """
        wanted = request.response_format
        if not tools and wanted.kind == "text":
            return None, ()
        schema = {"type": "object"} if wanted.kind == "json_object" else wanted.schema if wanted.kind == "json_schema" else None
        added = self._tokenizer.added
        callable_names = {tool.name for tool in request.callable_tools}
        spec = AnswerSpec(
            request=request,
            tools=tuple(tool for tool in tools if tool.name in callable_names),
            reasoning_open=reasoning_open,
            may_think=request.thinking.on,
            json_schema=schema,
            markers=frozenset(tag for tag in self._format.tags if tag in added),
        )
        lark = LarkBuilder(added, strict=wanted.strict)
        try:
            text = self._format.grammar(spec, lark)
            compiled = self._compiler.compile(text)
        except SchemaError as error:
            raise bad_request(f"The schema cannot be used: {error}", "response_format") from error
        except GrammarRefused as refusal:
            raise bad_request(f"The grammar of this request cannot be compiled: {refusal.reason}.") from refusal
        for name, reason in spec.degraded.items():
            _log.warning("request %s: the schema of tool %s is not enforced: %s", request.id, name, reason)
        return compiled, tuple(f"{missing.pointer} {missing.keyword}" for missing in lark.unenforced)
