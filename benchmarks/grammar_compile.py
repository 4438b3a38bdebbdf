"""Compile times of answer grammars over a vocabulary of 248k tokens: a request in, a grammar ready to use out.

The tool sets are those of tests/data/tool_sets. With `POOLED_SHARED` (or ../shared) also the sets of real agents.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Size, at_most, main, measured
from pooled_mlx import chat_formats
from pooled_mlx.core.request import Request, ResponseFormat, Tool, Turn
from pooled_mlx.grammar.answer import answer_grammar
from pooled_mlx.grammar.match import Compiler, GrammarTokenizer
from tests.data.tool_sets import agent_sets, tool_set
from tests.real_tokenizers import qwen36_folder

LOGITS, ENDS = 248_320, (248_046, 248_044)
BARS = {"ten": 10.0, "hundred": 60.0, "shapes": 100.0, "distinct": 800.0}
"""Milliseconds, as the best of the runs: what else the machine does is not what is measured."""

SEEN_BAR = 1.0
SIZES = (Size("runs", 7, 2, "times each set is compiled anew"),)
FORMATS = {
    "4 levels, 6 enums": {
        "type": "object",
        "properties": {
            f"a{i}": {
                "type": "object",
                "properties": {
                    "kind": {"enum": [f"k{i}{j}" for j in range(5)]},
                    "items": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
                },
                "required": ["kind"],
                "additionalProperties": False,
            }
            for i in range(6)
        },
        "additionalProperties": False,
    },
    "title": {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    },
}


def run(values: Any) -> Iterator[Result]:
    """Yields one result for each set and chat format."""
    text = (qwen36_folder() / "tokenizer.json").read_text(encoding="utf-8")
    began = time.perf_counter()
    tokenizer = GrammarTokenizer(text, n_vocab=LOGITS, eos_ids=ENDS)
    yield measured("tokenizer, once per start", time.perf_counter() - began, " s")
    for name in ("hermes", "qwen3_coder"):
        for label, bar in BARS.items():
            request = _request(tool_set(label))
            yield at_most(f"{name}, {label}", min(_times(tokenizer, name, request, values.runs)), bar, " ms")
            again = _seen(tokenizer, name, request, [request] * 3 * values.runs)
            yield at_most(f"{name}, {label}, seen before", min(again), SEEN_BAR, " ms")
            anew = _seen(tokenizer, name, request, [copy.deepcopy(request) for _ in range(values.runs)])
            yield measured(f"{name}, {label}, seen before, in another body", min(anew), " ms")
        for client, tools in _agents().items():
            yield measured(f"{name}, {client}", min(_times(tokenizer, name, _request(tools), values.runs)), " ms")
    for label, schema in FORMATS.items():
        request = Request("r", (Turn("user", "x"),), response_format=ResponseFormat("json_schema", schema, strict=True))
        yield measured(f"format, {label}", min(_times(tokenizer, "hermes", request, values.runs)), " ms")


def _request(tools: tuple[Tool, ...]) -> Request:
    return Request("r", (Turn("user", "x"),), tools=tools)


def _times(tokenizer: GrammarTokenizer, name: str, request: Request, runs: int) -> list[float]:
    """Milliseconds from the request to the compiled grammar, nothing remembered."""
    chat_format = chat_formats.get(name)
    found = []
    for _ in range(runs):
        compiler = Compiler(tokenizer, deadline_seconds=120)
        compiler.compile('%llguidance {}\nstart: "x"\n')  # starts its worker, which a server has from its first request on
        gc.collect()
        began = time.perf_counter()
        answer_grammar(request, chat_format, compiler)
        found.append((time.perf_counter() - began) * 1000)
    return found


def _seen(tokenizer: GrammarTokenizer, name: str, first: Request, requests: Sequence[Request]) -> list[float]:
    """Milliseconds for requests that ask what `first` asked before.

    The prompt's side knows a tool set again and gives the same objects; objects out of another body must be read to be known.
    """
    chat_format, compiler = chat_formats.get(name), Compiler(tokenizer, deadline_seconds=120)
    answer_grammar(first, chat_format, compiler)
    found = []
    for request in requests:
        began = time.perf_counter()
        answer_grammar(request, chat_format, compiler)
        found.append((time.perf_counter() - began) * 1000)
    return found


def _agents() -> dict[str, tuple[Tool, ...]]:
    traces = Path(os.environ.get("POOLED_SHARED") or Path(__file__).resolve().parents[2] / "shared") / "traces"
    return {client: tools for client, tools in agent_sets(traces).items() if len(tools) > 5}


if __name__ == "__main__":
    main(__doc__, SIZES, run)
