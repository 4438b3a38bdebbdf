"""What a model writes about thinking tags reaches the clients of all three APIs as text, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.chat_completions import EDGE as CHAT
from pooled_mlx.api.edge import Edge
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.events import Finished, Usage
from tests.answers import GEMMA_TAGS, HARMONY_TAGS, MISTRAL_TAGS, TAGS, says
from tests.golden.loader import Case, Header, render_stream, render_whole
from tests.wire import frames

EDGES: dict[str, Edge] = {"chat_completions": CHAT, "responses": ResponsesEdge(), "messages": MessagesEdge()}
ANSWERS = {
    "qwen3_coder": (TAGS, "", "It opens with <think>\nand </think> closes it:\n<think>hm</think>\nDone."),
    "mistral": (MISTRAL_TAGS, "", "[THINK]hm[/THINK] is how it looks."),
    "gemma": (GEMMA_TAGS, "", "<|channel>thought\nhm<channel|> is how it looks."),
    "harmony": (HARMONY_TAGS, "<|channel|>final<|message|>", "Write <|channel|>analysis<|message|>hm, then go on."),
}


def content(api: str, body: dict[str, Any]) -> dict[str, str]:
    """Text and reasoning of a whole answer."""
    found = {"text": "", "reasoning": ""}
    if api == "chat_completions":
        message = body["choices"][0]["message"]
        return {"text": message["content"] or "", "reasoning": message.get("reasoning_content") or ""}
    for part in body["content"] if api == "messages" else body["output"]:
        kind = "reasoning" if part["type"] in ("thinking", "reasoning") else "text"
        parts = [part] if api == "messages" else part["content"]
        found[kind] += "".join(piece.get("thinking") or piece.get("text") or "" for piece in parts)
    return found


def streamed(api: str, text: str) -> dict[str, str]:
    """Text and reasoning of a stream."""
    found = {"text": "", "reasoning": ""}
    for name, data in frames(text):
        if api == "chat_completions":
            for choice in data.get("choices", ()):
                found["text"] += choice["delta"].get("content") or ""
                found["reasoning"] += choice["delta"].get("reasoning_content") or ""
        elif api == "messages" and name == "content_block_delta":
            found["text"] += data["delta"].get("text", "")
            found["reasoning"] += data["delta"].get("thinking", "")
        elif name in ("response.output_text.delta", "response.reasoning_text.delta"):
            found["text" if "output" in name else "reasoning"] += data["delta"]
    return found


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("chat_format", ANSWERS)
@pytest.mark.parametrize("api", EDGES)
def test_thinking_tags_in_an_answer(api: str, chat_format: str, thinking: bool) -> None:
    tags, before, said = ANSWERS[chat_format]
    thought = "" if not thinking else "One thought."
    if thought and chat_format == "harmony":
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{before}"
    elif thought:
        before = f"{thought}{tags[1]}"
    outcome = says(before + said, chat_format, tags=tags, thinking=thinking)
    header = Header(model="pooled/fake-1b", created=1_760_000_000, prompt_tokens=31)
    case = Case("tags", header, (*outcome.raw_events, Finished(outcome.reason, Usage())))
    want = {"text": said, "reasoning": thought}
    assert content(api, render_whole(EDGES[api], api, case)) == want
    assert streamed(api, render_stream(EDGES[api], api, case)) == want
