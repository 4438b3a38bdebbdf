"""Our readers against the call parsers of mlx-lm, which judge well-formed calls of each format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pooled_mlx.core.request import Tool
from tests.answers import GEMMA_TAGS, GLM_TAGS, MISTRAL_TAGS, TAGS, says
from tests.written_calls import FAMILIES

TOOL = Tool(
    "do-it",
    parameters={
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "b": {"type": "boolean"},
            "l": {"type": "array"},
            "o": {"type": "object"},
        },
    },
)
LISTED = [{"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}]
ARGUMENTS = {"s": 'two\nlines, "quoted" é🙂', "n": 5, "b": True, "l": [1, "x"], "o": {"k": [False, 2.5]}}


def judge(name: str) -> ModuleType:
    """One of mlx-lm's parser files, loaded without the package around it (which needs MLX)."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("mlx-lm is not installed")
    path = Path(package.submodule_search_locations[0]) / "tool_parsers" / f"{name}.py"
    if not path.exists():
        pytest.skip(f"this mlx-lm has no parser {name}")
    spec = importlib.util.spec_from_file_location(f"judge_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


BODIES = {
    "hermes": ("json_tools", TAGS, json.dumps({"name": TOOL.name, "arguments": ARGUMENTS}, ensure_ascii=False)),
    "qwen3_coder": (
        "qwen3_coder",
        TAGS,
        f"<function={TOOL.name}>\n"
        + "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in ARGUMENTS.items())
        + "</function>",
    ),
    "glm": (
        "glm47",
        GLM_TAGS,
        f"{TOOL.name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in ARGUMENTS.items()),
    ),
    "mistral": ("mistral", MISTRAL_TAGS, f"{TOOL.name}[ARGS]{json.dumps(ARGUMENTS, ensure_ascii=False)}"),
    "minimax": (
        "minimax_m2",
        FAMILIES["minimax"].tags,
        FAMILIES["minimax"].one(TOOL.name, **ARGUMENTS)[len("<minimax:tool_call>") : -len("</minimax:tool_call>")],
    ),
    "kimi": (
        "kimi_k2",
        FAMILIES["kimi"].tags,
        f"<|tool_call_begin|>functions.{TOOL.name}:0<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|>",
    ),
    "gemma": ("gemma4", GEMMA_TAGS, f"call:{TOOL.name}{gemma_value(ARGUMENTS)}"),
}


@pytest.mark.parametrize("chat_format", sorted(BODIES))
def test_a_well_formed_call_reads_as_mlx_lm_reads_it(chat_format: str) -> None:
    name, tags, body = BODIES[chat_format]
    parser = judge(name)
    judged = parser.parse_tool_call(body, LISTED)
    judged = judged[0] if isinstance(judged, list) else judged
    arguments = judged["arguments"]
    outcome = says(f"{parser.tool_call_start}{body}{parser.tool_call_end}", chat_format, (TOOL,), tags=tags)
    assert outcome.calls == [(TOOL.name, ARGUMENTS)]
    assert judged["name"] == TOOL.name
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == ARGUMENTS
