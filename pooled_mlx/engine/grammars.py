"""The grammars of one model: from a request to a compiled grammar for its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pooled_mlx.chat_formats.base import ChatFormat
from pooled_mlx.core.request import Request, Tool
from pooled_mlx.grammar.answer import AnswerGrammar, answer_grammar
from pooled_mlx.grammar.match import Compiler, GrammarTokenizer

_log = logging.getLogger("pooled.grammar")


class Grammars:
    """Makes and compiles answer grammars. Safe to use from any worker thread."""

    def __init__(self, tokenizer: GrammarTokenizer, chat_format: ChatFormat) -> None:
        self._format = chat_format
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

    def compile(self, request: Request, tools: tuple[Tool, ...], *, reasoning_open: bool) -> AnswerGrammar:
        """The grammar of a request's answer, and what it does not enforce.

        `tools` are the request's tools in the order of the prompt. Raises `ApiError` (400).
        """
        return answer_grammar(request, self._format, self._compiler, tools, reasoning_open=reasoning_open)
