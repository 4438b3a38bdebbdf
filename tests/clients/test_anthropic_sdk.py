"""The official Anthropic Python SDK against a live server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel

from pooled_mlx.core.errors import engine_failed, not_ready, queue_full
from pooled_mlx.core.events import Failed, Finished, Text
from pooled_mlx.core.request import ResponseFormat, Thinking, ToolCall, Turn
from tests.api.live import Live
from tests.clients.apis import USAGE, calls, says, three_apis

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "read_file", "description": "Read.", "input_schema": {"type": "object"}}]


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with three_apis() as server:
        yield server


@pytest.fixture
async def client(live: Live) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=live.url, api_key="any", max_retries=0) as sdk:
        yield sdk


async def test_whole_message(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(*says("Hello, world.", thinking="thinking"))
    message = await client.messages.create(
        model="claude-haiku-4-5", max_tokens=100, messages=HI, thinking={"type": "enabled", "budget_tokens": 64}
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "thinking"
    assert message.content[1].text == "Hello, world."
    assert message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (16, 24, 9)
    assert live.engine.last.thinking == Thinking(True, None, 64)


async def test_stream_helper(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(*says("Hello, world.", thinking="thinking"))
    texts: list[str] = []
    async with client.messages.stream(
        model="m", max_tokens=100, messages=HI, thinking={"type": "adaptive"}, system="Be brief."
    ) as stream:
        async for text in stream.text_stream:
            texts.append(text)
        message = await stream.get_final_message()
    assert "".join(texts) == "Hello, world."
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == "thinking"
    assert message.content[0].signature.startswith("pooled1.")
    assert message.usage.cache_read_input_tokens == 24
    assert message.usage.input_tokens == 16


async def test_tool_round_with_thinking_sent_back(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(*calls(("read_file", '{"path": "ä"}'), ("read_file", "{}"), thinking="Two files."))
    live.engine.script(*says("Done."))
    async with client.messages.stream(model="m", max_tokens=100, messages=HI, tools=TOOLS) as stream:
        message = await stream.get_final_message()
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"path": "ä"}, {}]
    assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "text"} for use in uses]
    history = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    final = await client.messages.create(model="m", max_tokens=100, messages=history, tools=TOOLS)
    assert final.content[0].text == "Done."
    turn = live.engine.last.turns[1]
    assert turn.reasoning == "Two files."
    assert turn.tool_calls[0] == ToolCall("call_live0000", "read_file", '{"path":"ä"}')


async def test_tool_runner_runs_the_tools_and_keeps_the_whole_conversation(live: Live, client: AsyncAnthropic) -> None:
    ran: list[str] = []

    @beta_async_tool
    async def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: Where it is.
        """
        ran.append(path)
        return f"text of {path}"

    live.engine.script(*calls(("read_file", '{"path": "a"}'), thinking="First a."))
    live.engine.script(*calls(("read_file", '{"path": "b"}'), first=1))
    live.engine.script(*says("Read both."))
    runner = client.beta.messages.tool_runner(model="m", max_tokens=100, tools=[read_file], messages=HI, system="Be brief.")
    final = await runner.until_done()
    assert ran == ["a", "b"]
    assert final.content[0].text == "Read both."
    last = live.engine.last
    assert [turn.role for turn in last.turns] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert last.turns[2].reasoning == "First a."
    assert last.turns[5] == Turn("tool", "text of b", tool_call_id="call_live0001", name="read_file")
    assert [tool.name for tool in last.tools] == ["read_file"]
    assert len(live.engine.requests) == 3


class Title(BaseModel):
    title: str


async def test_structured_output_helper(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(*says('{"title": "Hello"}'))
    message = await client.messages.parse(model="m", max_tokens=100, messages=HI, output_format=Title)
    assert message.parsed_output == Title(title="Hello")
    wanted = live.engine.last.response_format
    assert isinstance(wanted, ResponseFormat)
    assert wanted.kind == "json_schema"
    assert isinstance(wanted.schema, dict)
    assert wanted.schema["required"] == ["title"]


async def test_structured_output_while_streaming(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(*says('{"title": "Hello"}'))
    async with client.messages.stream(model="m", max_tokens=100, messages=HI, output_format=Title) as stream:
        message = await stream.get_final_message()
    assert message.parsed_output == Title(title="Hello")


async def test_counting_equals_the_prompt_of_the_real_request(live: Live, client: AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model="m", messages=HI, system="Be brief.", tools=TOOLS)
    await client.messages.create(model="m", max_tokens=9, messages=HI, system="Be brief.", tools=TOOLS)
    assert count.input_tokens == live.engine.generations[-1].prepared.prompt_tokens
    assert live.engine.counted[0].turns == live.engine.last.turns


async def test_models(live: Live, client: AsyncAnthropic) -> None:
    models = [model async for model in await client.models.list()]
    assert [model.id for model in models] == [live.engine.model.public_id]
    assert (await client.models.retrieve(models[0].id)).display_name == live.engine.model.label
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude-opus-9")


async def test_stop_sequence(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(Text("alpha "), Finished("stop", USAGE, "beta"))
    message = await client.messages.create(model="m", max_tokens=9, messages=HI, stop_sequences=["beta"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "beta")
    assert live.engine.last.stop == ("beta",)


async def test_refusals_are_the_right_exceptions(live: Live, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="m", max_tokens=0, messages=HI)
    assert "max_tokens" in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"
    for error in (queue_full(8), not_ready("The model is loading.")):
        live.engine.submit_error = error
        with pytest.raises(anthropic.APIStatusError) as busy:
            await client.messages.create(model="m", max_tokens=9, messages=HI)
        assert busy.value.status_code == 529
        assert busy.value.response.headers["retry-after"] == "5"


async def test_a_long_prompt_is_refused_before_the_stream(live: Live, client: AsyncAnthropic) -> None:
    long = [{"role": "user", "content": "word " * 40_000}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        async with client.messages.stream(model="m", max_tokens=9, messages=long) as stream:
            await stream.get_final_message()
    assert "prompt is too long" in refused.value.message


async def test_a_failure_in_the_stream_is_an_exception(live: Live, client: AsyncAnthropic) -> None:
    live.engine.script(Text("Half"), Failed(engine_failed("The model failed.")))
    with pytest.raises(anthropic.APIStatusError) as failed:
        async with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
            await stream.get_final_message()
    assert "The model failed." in str(failed.value)


async def test_a_cut_call_ends_with_max_tokens(live: Live, client: AsyncAnthropic) -> None:
    whole = calls(("read_file", '{"path": "a"}'))
    live.engine.script(*whole[:2], Finished("length", USAGE))
    async with client.messages.stream(model="m", max_tokens=9, messages=HI, tools=TOOLS) as stream:
        message = await stream.get_final_message()
    assert message.stop_reason == "max_tokens"
