"""The official OpenAI Python SDK against a live server: Chat Completions and Responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from pooled_mlx.core.errors import engine_failed, not_ready, queue_full
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Failed, Finished, Text
from pooled_mlx.core.request import Thinking, ToolCall, Turn
from tests.api.live import Live
from tests.clients.apis import USAGE, calls, says, three_apis

HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": False}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA, "strict": True}}]
TOOLS: Any = [{"type": "function", "name": "read_file", "parameters": SCHEMA, "strict": True}]


class Title(BaseModel):
    title: str


class Search(BaseModel):
    query: str


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with three_apis() as server:
        yield server


@pytest.fixture
async def client(live: Live) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


async def test_chat_whole(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*says("Hello, world.", thinking="thinking"))
    answer = await client.chat.completions.create(model="gpt-4o", messages=HI, reasoning_effort="high")
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].message.model_extra == {"reasoning_content": "thinking"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 24
    assert live.engine.last.thinking == Thinking(True, "high")


async def test_chat_stream_helper(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*says("Hello, world."))
    async with client.chat.completions.stream(model="m", messages=HI, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == "Hello, world."
    assert final.choices[0].message.content == "Hello, world."
    assert final.usage is not None
    assert final.usage.completion_tokens == 9


async def test_chat_tools_whole_and_streamed(live: Live, client: AsyncOpenAI) -> None:
    answer_calls = calls(("read_file", '{"path": "a"}'), ("read_file", '{"path": "b"}'))
    live.engine.script(*answer_calls)
    live.engine.script(*answer_calls)
    whole = await client.chat.completions.create(model="m", messages=HI, tools=CHAT_TOOLS)
    async with client.chat.completions.stream(model="m", messages=HI, tools=CHAT_TOOLS) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        assert answer.choices[0].finish_reason == "tool_calls"
        got = [(call.id, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
        assert got == [("call_live0000", '{"path": "a"}'), ("call_live0001", '{"path": "b"}')]
    message = whole.choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "text"} for call in message["tool_calls"]]
    await client.chat.completions.create(model="m", messages=[*HI, message, *results], tools=CHAT_TOOLS)
    assert [turn.role for turn in live.engine.last.turns] == ["user", "assistant", "tool", "tool"]


async def test_chat_parse_helpers(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*says('{"title": "Hello"}'))
    live.engine.script(*calls(("Search", '{"query": "x"}')))
    parsed = await client.chat.completions.parse(model="m", messages=HI, response_format=Title)
    assert parsed.choices[0].message.parsed == Title(title="Hello")
    assert live.engine.last.response_format.strict
    called = await client.chat.completions.parse(model="m", messages=HI, tools=[pydantic_function_tool(Search)])
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == Search(query="x")


async def test_responses_whole(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*says("Hello, world.", thinking="thinking"))
    answer = await client.responses.create(
        model="gpt-5.5",
        input="hi",
        instructions="Be brief.",
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        store=False,
    )
    assert answer.output_text == "Hello, world."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 24
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert live.engine.last.turns == (Turn("system", "Be brief."), Turn("user", "hi"))


async def test_responses_stream_helper(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*says("Hello, world.", thinking="thinking"))
    async with client.responses.stream(model="m", input="hi", reasoning={"effort": "low"}) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.reasoning_text.delta") == 2
    assert final.output_text == "Hello, world."


async def test_responses_tools_by_stored_history(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*calls(("read_file", '{"path": "a"}'), thinking="Read a."))
    live.engine.script(*says("Done."))
    first = await client.responses.create(model="m", input="hi", tools=TOOLS)
    call = first.output[1]
    assert call.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "text"}]
    second = await client.responses.create(model="m", input=output, previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "Done."
    assert second.previous_response_id == first.id
    assert live.engine.last.turns[1] == Turn(
        "assistant", "", "Read a.", (ToolCall("call_live0000", "read_file", '{"path": "a"}'),)
    )


async def test_responses_tools_without_storage(live: Live, client: AsyncOpenAI) -> None:
    live.engine.script(*calls(("read_file", '{"path": "a"}'), thinking="Read a."))
    options: Any = {"tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    first = await client.responses.create(model="m", input=HI, **options)
    history: Any = [*HI, *(item.model_dump(exclude_none=True) for item in first.output)]
    history.append({"type": "function_call_output", "call_id": "call_live0000", "output": "text"})
    async with client.responses.stream(model="m", input=history, **options) as stream:
        final = await stream.get_final_response()
    assert final.status == "completed"
    assert live.engine.last.turns[1].reasoning == "Read a."


async def test_responses_parse_helpers(live: Live, client: AsyncOpenAI) -> None:
    for _ in range(2):
        live.engine.script(*says('{"title": "Hello"}'))
    live.engine.script(*calls(("Search", '{"query": "x"}')))
    parsed = await client.responses.parse(model="m", input="hi", text_format=Title)
    assert parsed.output_parsed == Title(title="Hello")
    async with client.responses.stream(model="m", input="hi", text_format=Title) as stream:
        assert (await stream.get_final_response()).output_parsed == Title(title="Hello")
    tool = openai.pydantic_function_tool(Search)["function"]
    flat: Any = {"type": "function", **tool}
    called = await client.responses.parse(model="m", input="hi", tools=[flat])
    assert called.output[0].type == "function_call"
    assert json.loads(called.output[0].arguments) == {"query": "x"}


async def test_custom_tools(live: Live, client: AsyncOpenAI) -> None:
    text = "*** Begin Patch\n+ä\n"
    events = [CallStart(0, "call_1", "apply_patch"), CallArguments(0, text[:5]), CallArguments(0, text[5:]), CallEnd(0)]
    live.engine.script(*events, Finished("tool_calls", USAGE))
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
    tools: Any = [{"type": "custom", "name": "apply_patch", "format": grammar}]
    async with client.responses.stream(model="m", input="hi", tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds.count("response.custom_tool_call_input.delta") == 2
    assert final.output[0].type == "custom_tool_call"
    assert final.output[0].input == text
    result: Any = [{"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}]
    await client.responses.create(model="m", input=result, previous_response_id=final.id, tools=tools)
    assert live.engine.last.turns[1].tool_calls == (ToolCall("call_1", "apply_patch", text, custom=True),)


async def test_stored_responses(live: Live, client: AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input=[*HI, {"role": "user", "content": "again"}])
    assert (await client.responses.retrieve(made.id)).output_text == made.output_text
    items: Any = [item async for item in await client.responses.input_items.list(made.id, limit=1)]
    assert [item.content[0].text for item in items] == ["again", "hi"]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as gone:
        await client.responses.create(model="m", input="x", previous_response_id=made.id)
    assert gone.value.code == "previous_response_not_found"


async def test_counting(live: Live, client: AsyncOpenAI) -> None:
    count = await client.responses.input_tokens.count(model="m", input="hi", instructions="Be brief.")
    await client.responses.create(model="m", input="hi", instructions="Be brief.")
    assert count.input_tokens == live.engine.generations[-1].prepared.prompt_tokens


async def test_a_cut_answer_is_incomplete(live: Live, client: AsyncOpenAI) -> None:
    for _ in range(2):
        live.engine.script(Text("Half"), Finished("length", USAGE))
    whole = await client.responses.create(model="m", input="hi", max_output_tokens=1)
    async with client.responses.stream(model="m", input="hi") as stream:
        final = [event async for event in stream][-1]
    assert final.type == "response.incomplete"
    for answer in (whole, final.response):
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"


async def test_refusals_are_the_right_exceptions(live: Live, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="hi", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model="m", input="word " * 40_000, stream=True)
    assert long.value.code == "context_length_exceeded"
    live.engine.submit_error = queue_full(8)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="m", input="hi")
    live.engine.submit_error = not_ready("The model is loading.")
    with pytest.raises(openai.InternalServerError) as loading:
        await client.responses.create(model="m", input="hi")
    assert loading.value.status_code == 503
    assert loading.value.response.headers["retry-after"] == "5"


async def test_failures_in_the_stream(live: Live, client: AsyncOpenAI) -> None:
    for _ in range(2):
        live.engine.script(Text("Half"), Failed(engine_failed("The model failed.")))
    async with client.responses.stream(model="m", input="hi") as stream:
        final = [event async for event in stream][-1]
    assert final.type == "response.failed"
    assert final.response.error is not None
    assert final.response.error.message == "The model failed."
    with pytest.raises(openai.APIError) as failed:
        async for _ in await client.chat.completions.create(model="m", messages=HI, stream=True):
            pass
    assert "The model failed." in str(failed.value)


async def test_models(live: Live, client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [live.engine.model.public_id]
    assert (await client.models.retrieve("pooled")).id == live.engine.model.public_id
