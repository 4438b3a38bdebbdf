"""The user's page on Chat Completions against a live server: official SDK and raw HTTP, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from pooled_mlx.core.request import Sampling, Thinking
from pooled_mlx.server.hooks import Hooks
from tests.api.live import CHAT, Live, frames, running
from tests.fakes import FakeEngine

MESSAGES: Any = [{"role": "user", "content": "What is a KV cache?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS: list[Event] = [
    CallStart(0, "call_1", "get_weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Brno"}'),
    CallEnd(0),
    CallStart(1, "call_2", "get_weather"),
    CallArguments(1, '{"city": "Oslo"}'),
    CallEnd(1),
    Finished("tool_calls", Usage(50, 30, 40)),
]


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with running() as server:
        yield server


@pytest.fixture
async def sdk(live: Live) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="pooled", max_retries=0) as client:
        yield client


async def test_the_curl_example(live: Live) -> None:
    body = """{
      "model": "pooled",
      "messages": [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is a KV cache?"}
      ],
      "stream": true,
      "stream_options": {"include_usage": true}
    }"""
    response = await live.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = frames(response.text)
    assert done == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in data]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["model"] == "pooled/fake-1b"
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["prompt_tokens"] + 3
    assert [turn.role for turn in live.engine.last.turns] == ["system", "user"]


async def test_the_python_example(live: Live) -> None:
    def example() -> str:
        client = OpenAI(base_url=f"{live.url}/v1", api_key="pooled")
        stream = client.chat.completions.create(model="pooled", messages=MESSAGES, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(example) == "Hello there."


async def test_the_response(live: Live) -> None:
    live.engine.script(Text("A KV cache stores ..."), Finished("stop", Usage(31, 42)))
    response = await live.chat(messages=MESSAGES)
    body = response.json()
    assert re.fullmatch(r"chatcmpl-\w+", body.pop("id"))
    assert body.pop("created") > 1_700_000_000
    usage = body.pop("usage")
    assert body == {
        "object": "chat.completion",
        "model": "pooled/fake-1b",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "A KV cache stores ...", "refusal": None},
                "finish_reason": "stop",
            }
        ],
    }
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (31, 42, 73)
    assert response.headers["content-type"] == "application/json"


async def test_any_key_works_without_a_token(live: Live) -> None:
    for headers in ({}, {"authorization": "Bearer x"}, {"x-api-key": "y"}, {"authorization": "Basic eDp5"}):
        assert (await live.http.post(CHAT, json={"messages": MESSAGES}, headers=headers)).status_code == 200


async def test_ids_differ(live: Live) -> None:
    assert len({(await live.chat()).json()["id"] for _ in range(5)}) == 5


@pytest.mark.parametrize("model", ["claude-haiku-4-5", "gpt-4o", "someone/other-model", "../../etc", ""])
async def test_any_model_name(live: Live, model: str) -> None:
    assert (await live.chat(model=model)).json()["model"] == "pooled/fake-1b"


@pytest.mark.parametrize(
    ("reason", "shown"), [("stop", "stop"), ("tool_calls", "tool_calls"), ("length", "length"), ("context_full", "length")]
)
async def test_finish_reasons(live: Live, sdk: AsyncOpenAI, reason: Any, shown: str) -> None:
    for _ in range(2):
        live.engine.script(Text("x"), Finished(reason, Usage(9, 1)))
    whole = await sdk.chat.completions.create(model="m", messages=MESSAGES)
    assert whole.choices[0].finish_reason == shown
    stream = await sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert [chunk.choices[0].finish_reason async for chunk in stream] == [None, None, shown]


async def test_usage_details(live: Live, sdk: AsyncOpenAI) -> None:
    for _ in range(2):
        live.engine.script(Reasoning("Hm."), Text("x"), Finished("stop", Usage(900, 30, 850, 12)))
    whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, reasoning_effort="low")
    stream = await sdk.chat.completions.create(
        model="m", messages=MESSAGES, reasoning_effort="low", stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage]
    for usage in [whole.usage, *usages]:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.completion_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens) == (850, 12)
    assert len(usages) == 1


async def test_no_usage_chunk_unless_asked(live: Live) -> None:
    assert '"usage"' not in (await live.chat(stream=True)).text


async def test_thinking(live: Live, sdk: AsyncOpenAI) -> None:
    thought: list[Event] = [Reasoning("The user "), Reasoning("asks."), Text("Hi"), Finished("stop", Usage(9, 5, 0, 3))]
    live.engine.script(*thought)
    live.engine.script(*thought)
    whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, reasoning_effort="high")
    assert live.engine.last.thinking == Thinking(True, "high")
    message = whole.choices[0].message
    assert (message.content, message.model_extra) == ("Hi", {"reasoning_content": "The user asks."})
    stream = await sdk.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    assert live.engine.last.thinking == Thinking(True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "The user asks."
    assert "".join(delta.content or "" for delta in deltas) == "Hi"


async def test_thinking_is_off_unless_asked(live: Live) -> None:
    body = (await live.chat()).json()
    assert live.engine.last.thinking == Thinking()
    assert "reasoning_content" not in body["choices"][0]["message"]


async def test_tool_calls(live: Live, sdk: AsyncOpenAI) -> None:
    live.engine.script(*CALLS)
    live.engine.script(*CALLS)
    whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])
    message = whole.choices[0].message
    assert message.content is None
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [(call.id, call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [  # type: ignore[union-attr]
        ("call_1", "function", "get_weather", '{"city": "Brno"}'),
        ("call_2", "function", "get_weather", '{"city": "Oslo"}'),
    ]
    async with sdk.chat.completions.stream(model="m", messages=MESSAGES, tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [(call.function.name, call.function.arguments) for call in final.choices[0].message.tool_calls or ()] == [
        ("get_weather", '{"city": "Brno"}'),
        ("get_weather", '{"city": "Oslo"}'),
    ]


async def test_a_whole_tool_round(live: Live, sdk: AsyncOpenAI) -> None:
    live.engine.script(*CALLS)
    first = await sdk.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])
    calls = first.choices[0].message.tool_calls or []
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    history: Any = [*MESSAGES, first.choices[0].message.model_dump(exclude_none=True), *results]
    second = await sdk.chat.completions.create(model="m", messages=history, tools=[WEATHER])
    assert second.choices[0].message.content == "Hello there."
    turns = live.engine.last.turns
    assert [call.id for call in turns[1].tool_calls] == ["call_1", "call_2"]
    assert [(turn.tool_call_id, turn.name, turn.text) for turn in turns[2:]] == [
        ("call_1", "get_weather", "rain"),
        ("call_2", "get_weather", "rain"),
    ]


async def test_parameters_reach_the_engine(live: Live, sdk: AsyncOpenAI) -> None:
    await sdk.chat.completions.create(
        model="m",
        messages=MESSAGES,
        temperature=0.2,
        max_completion_tokens=100_000,
        stop=["\n\n"],
        top_p=0.5,
        seed=7,
        user="u",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
        response_format={"type": "json_object"},
        extra_body={"top_k": 200},
    )
    request = live.engine.last
    assert request.sampling == Sampling(0.2, 64)
    assert request.max_output_tokens == 65_536
    assert request.stop == ("\n\n",)
    assert (request.tool_choice.mode, request.tool_choice.name, request.call_limit) == ("named", "get_weather", 1)
    assert request.response_format.kind == "json_object"
    assert request.client == "AsyncOpenAI"


async def test_the_output_limit_has_a_default_and_the_context_as_its_end(live: Live) -> None:
    await live.chat()
    await live.chat(max_tokens=64_000)
    small, large = (generation.prepared.max_output_tokens for generation in live.engine.generations)
    assert small == 16_384
    assert large < live.engine.model.context_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"n": 2}, "n"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction"),
        ({"web_search_options": {"user_location": {}}}, "web_search_options"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "1, 2,"}]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_refusals(live: Live, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = await live.chat(stream=stream, **fields)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert live.engine.generations == []


async def test_images_do_not_break_a_session(live: Live, sdk: AsyncOpenAI) -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    await sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "see: "}, image]}]
    )
    assert live.engine.last.turns[0].text == "see: [image omitted: this model reads text only]"


async def test_the_sdk_sees_refusals_as_bad_requests(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="m", messages=MESSAGES, n=2)
    assert caught.value.param == "n"


async def test_surrogates_and_nul_arrive(live: Live) -> None:
    body = b'{"messages":[{"role":"user","content":"a\\ud800b\\u0000c \\ud83d\\ude00"}]}'
    response = await live.http.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 200
    assert live.engine.last.turns[0].text == "a\ufffdb\x00c \U0001f600"


async def test_a_stop_string_ends_with_stop(live: Live) -> None:
    live.engine.script(Text("alpha "), Finished("stop", Usage(9, 2), stop="beta gamma"))
    body = (await live.chat(stop=["beta gamma", "zzzzzzzz"])).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("alpha ", "stop")


async def test_the_overflow_text_is_the_one_clients_know() -> None:
    engine = FakeEngine()
    async with running(engine) as live:
        long = [{"role": "user", "content": "word " * 40_000}]
        for stream in (False, True):
            response = await live.chat(messages=long, stream=stream)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert re.match(
                r"prompt is too long: \d+ tokens > 32768 maximum\. .*maximum context length is 32768 tokens", error["message"]
            )


async def test_headers_of_a_whole_answer(live: Live) -> None:
    live.engine.script(Text("x"), Finished("stop", Usage(9, 1, 8), cache_note="reused 8 of 9 tokens; “ü”"))
    live.engine.unenforced = ("/properties/a/if", "/properties/b/not")
    response: httpx.Response = await live.chat()
    assert response.headers["x-pooled-cache"] == r"reused 8 of 9 tokens; \u201c\xfc\u201d"
    assert response.headers["x-pooled-unenforced"] == "/properties/a/if, /properties/b/not"
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_enforced_is_counted(stream: bool) -> None:
    counted: list[int] = []
    async with running(app_options={"hooks": Hooks(unenforced=counted.append)}) as live:
        live.engine.script(Text("x"), Finished("stop", Usage(9, 1)))
        await live.chat(stream=stream)
        live.engine.unenforced = ("/properties/a/if", "/properties/b/not")
        live.engine.script(Text("x"), Finished("stop", Usage(9, 1)))
        await live.chat(stream=stream)
        assert counted == [2]
        assert [request.api for request in live.engine.requests] == ["chat_completions"] * 2


async def test_cache_comment_and_unenforced_header_of_a_stream(live: Live) -> None:
    live.engine.script(Text("x"), Finished("stop", Usage(9, 1, 8), cache_note="reused 8 of 9 tokens"))
    live.engine.unenforced = ("/if",)
    response = await live.chat(stream=True, stream_options={"include_usage": True})
    got = frames(response.text)
    assert response.headers["x-pooled-unenforced"] == "/if"
    assert got[-3] == ": cache reused 8 of 9 tokens"
    assert json.loads(got[-2].removeprefix("data: "))["choices"] == []
