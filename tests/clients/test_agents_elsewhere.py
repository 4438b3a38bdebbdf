"""Agents whose own settings name another server: started by `connect --run` they talk to ours, and the other one stays silent.

Where an agent is not installed (`make agents` installs them), its documented precedence is tested in
tests/unit/test_connect_safety.py.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_agents import FOLDER, ROOT, run_agents

_SECONDS = 120
_OPENCODE = {
    "model": "o/m",
    "provider": {
        "o": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "OTHER/v1", "apiKey": "k"}, "models": {"m": {}}}
    },
    "agent": {"build": {"model": "o/m"}},
}
_CLINE = {"provider": "openai-compatible", "apiKey": "k", "model": "m", "baseUrl": "OTHER/v1"}
_PI = {"baseUrl": "OTHER/v1", "api": "openai-completions", "apiKey": "k", "models": [{"id": "pooled/m"}]}
_CLOUD = {"CLAUDE_CODE_USE_BEDROCK": "1", "ANTHROPIC_BEDROCK_BASE_URL": "OTHER", "AWS_REGION": "us-east-1"}
_AIDER = ["--message", "hi", "--yes-always", "--no-git", "--no-check-update", "--no-analytics"]
_ADDRESSES = {"OPENAI_BASE_URL": "OTHER/v1", "OPENAI_API_BASE": "OTHER/v1", "ANTHROPIC_BASE_URL": "OTHER"}
CASES: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "claude user": ("claude", "claude", ["-p", "hi"], {".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "OTHER"}}'}),
    "claude project": (
        "claude",
        "claude",
        ["-p", "hi"],
        {"project/.claude/settings.local.json": json.dumps({"env": {"ANTHROPIC_BASE_URL": "OTHER", **_CLOUD}})},
    ),
    "aider settings": ("aider", "aider", _AIDER, {".aider.conf.yml": "openai-api-base: OTHER/v1\nweak-model: openai/x\n"}),
    "aider env file": ("aider", "aider", _AIDER, {"project/.env": "OPENAI_BASE_URL=OTHER/v1\nOPENAI_API_BASE=OTHER/v1\n"}),
    "aider set-env": ("aider", "aider", _AIDER, {"project/.aider.conf.yml": "set-env:\n  - OPENAI_BASE_URL=OTHER/v1\n"}),
    "codex": (
        "codex",
        "codex",
        ["exec", "--skip-git-repo-check", "hi"],
        {
            ".codex/config.toml": 'model_provider = "x"\nmodel = "y"\n[model_providers.x]\nname = "x"\n'
            'base_url = "OTHER/v1"\nwire_api = "responses"\n'
        },
    ),
    "opencode": ("opencode", "opencode", ["run", "hi"], {"project/opencode.json": json.dumps(_OPENCODE)}),
    "qwen": (
        "qwen",
        "qwen",
        ["-p", "hi"],
        {
            ".qwen/settings.json": json.dumps({"env": {"OPENAI_BASE_URL": "OTHER/v1"}}),
            "project/.qwen/.env": "OPENAI_BASE_URL=OTHER/v1\n",
        },
    ),
    "pi": ("pi", "pi", ["-p", "hi"], {".pi/agent/models.json": json.dumps({"providers": {"pooled": _PI}})}),
    "continue": (
        "continue",
        "cn",
        ["-p", "hi"],
        {
            ".continue/config.yaml": "name: x\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: o\n    provider: openai\n"
            "    model: m\n    apiBase: OTHER/v1\n    apiKey: k\n"
        },
    ),
    "cline": (
        "cline",
        "cline",
        ["say hi to me"],
        {
            ".cline/data/settings/providers.json": json.dumps(
                {
                    "version": 1,
                    "lastUsedProvider": "openai-compatible",
                    "providers": {"openai-compatible": {"settings": _CLINE}},
                }
            )
        },
    ),
}


class _Listener(http.server.BaseHTTPRequestHandler):
    """Remembers what comes, and refuses all but the list of models."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.seen.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]
        is_list = self.path.endswith("/models")
        models = {"object": "list", "data": [{"id": "pooled/m", "object": "model", "context_length": 65536}]}
        error = {
            "type": "error",
            "error": {"message": "stop here", "type": "invalid_request_error", "param": None, "code": None},
        }
        text = json.dumps(models if is_list else error).encode()
        self.send_response(200 if is_list else 400)
        for name, value in (("content-type", "application/json"), ("x-should-retry", "false"), ("content-length", len(text))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_HEAD = do_PUT = answer

    def log_message(self, format: str, *args: Any) -> None:
        return None


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Listener) as httpd:
        httpd.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", httpd.seen  # type: ignore[attr-defined]
        finally:
            httpd.shutdown()
            thread.join()


@pytest.mark.parametrize("case", CASES)
def test_the_other_server_hears_nothing(case: str, tmp_path: Path) -> None:
    profile, program, words, files = CASES[case]
    path = run_agents.search_path(FOLDER)
    if shutil.which(program, path=path) is None:
        pytest.skip(f"{program} is not installed here (`make agents` installs it)")
    project = tmp_path / "project"
    project.mkdir()
    with listening() as (ours, heard), listening() as (other, overheard):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("OTHER", other))
        env = {
            "HOME": str(tmp_path),
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TERM": "dumb",
            "ANTHROPIC_API_KEY": "sk-of-the-user",
            "OPENAI_API_KEY": "sk-of-the-user",
            **{name: value.replace("OTHER", other) for name, value in _ADDRESSES.items()},
        }
        subprocess.run(
            [sys.executable, "-m", "pooled_mlx", "connect", profile, "--url", ours, "--run", *words],
            env=env,
            cwd=project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    assert overheard == []
    assert [line for line in heard if line.startswith("POST ")]
