"""The official JavaScript SDKs of OpenAI and Anthropic against a live server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.core.errors import engine_failed
from pooled_mlx.core.events import Failed, Text
from tests.clients.apis import calls, says, three_apis

PACKAGES = ("openai@7.59.0", "@anthropic-ai/sdk@1.14.0", "zod@4.1.12", "node@24")
SCRIPTS = Path(__file__).parent / "js"
INSTALL_SECONDS = 240
RUN_SECONDS = 60


@pytest.fixture(scope="module")
def sdks() -> Path:
    """A folder with the SDKs and a node that can run them; made once and kept for later runs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed here")
    folder = Path(os.environ.get("POOLED_JS_SDKS") or Path(tempfile.gettempdir()) / "pooled-mlx-js-sdks")
    stamp = folder / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(PACKAGES):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm install took more than {INSTALL_SECONDS} s")
        if done.returncode:
            pytest.skip(f"npm install failed: {done.stderr.strip()[-300:]}")
        stamp.write_text(json.dumps(PACKAGES))
    return folder


async def run(sdks: Path, script: str, url: str) -> dict[str, Any]:
    """Run a script beside the SDKs and read what it prints."""
    target = sdks / script
    shutil.copyfile(SCRIPTS / script, target)
    process = await asyncio.create_subprocess_exec(
        str(sdks / "node_modules/.bin/node"),
        str(target),
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


async def test_openai(sdks: Path) -> None:
    read = ("read_file", '{"path": "a"}')
    async with three_apis() as live:
        for answer in (
            says("Hello, world."),
            says("Hello, world."),
            calls(read),
            says("Read it."),
            says('{"title": "Hello"}'),
            says("Hello, world."),
            says("Hello, world.", thinking="thinking"),
            says('{"title": "Hello"}'),
            calls(read, first=1),
            says("Done."),
        ):
            live.engine.script(*answer)
        out = await run(sdks, "openai_sdk.mjs", live.url)
        requests = live.engine.requests
    assert out["chat"] == "Hello, world."
    assert out["chat_stream"] == {"deltas": "Hello, world.", "content": "Hello, world.", "cached": 24}
    assert out["run_tools"] == {"final": "Read it.", "ran": ["a"]}
    assert out["chat_parse"] == out["responses_parse"] == {"title": "Hello"}
    assert out["responses"] == "Hello, world."
    streamed = out["responses_stream"]
    assert streamed["text"] == "Hello, world."
    assert streamed["types"] == ["reasoning", "message"]
    assert (streamed["kinds"][0], streamed["kinds"][-1]) == ("response.created", "response.completed")
    assert out["stored"] == {"arguments": '{"path": "a"}', "text": "Done."}
    assert out["errors"] == [
        [400, "unsupported_parameter", "BadRequestError"],
        [400, "previous_response_not_found", "BadRequestError"],
    ]
    assert out["models"] == [live.engine.model.public_id]
    assert [turn.role for turn in requests[3].turns] == ["user", "assistant", "tool"]
    assert [turn.role for turn in requests[-1].turns] == ["user", "assistant", "tool"]


async def test_anthropic(sdks: Path) -> None:
    async with three_apis() as live:
        for answer in (
            says("Hello, world.", thinking="thinking"),
            says("Hello, world.", thinking="thinking"),
            calls(("read_file", '{"path": "a"}'), thinking="Read a."),
            says("Read it."),
            says('{"title": "Hello"}'),
            [Text("Half"), Failed(engine_failed("The model failed."))],
        ):
            live.engine.script(*answer)
        out = await run(sdks, "anthropic_sdk.mjs", live.url)
        requests = live.engine.requests
    assert out["message"]["types"] == ["thinking", "text"]
    assert out["message"]["stop"] == "end_turn"
    for usage in (out["message"]["usage"], out["stream"]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (16, 24, 9)
    assert (out["stream"]["deltas"], out["stream"]["thinking"]) == ("Hello, world.", "thinking")
    assert out["stream"]["signature"].startswith("pooled1.")
    assert out["tool_runner"] == {"ran": ["a"], "text": "Read it."}
    assert out["parse"] == {"title": "Hello"}
    assert out["count"] > 0
    assert out["models"] == [[live.engine.model.public_id, "model"]]
    assert out["error"] == [400, "invalid_request_error", "BadRequestError"]
    assert "The model failed." in out["failure"]
    assert [turn.role for turn in requests[3].turns] == ["user", "assistant", "tool"]
    assert requests[3].turns[1].reasoning == "Read a."
