"""Profiles of agents: exact settings, merges that keep what is there, and the command."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import stat
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pooled_mlx.connect import AGENTS, CannotMerge, FileChange, Launch, Target, banner_lines, profile_of
from pooled_mlx.connect.command import add, find_server, find_target
from pooled_mlx.connect.merge import JsonMerge, YamlMerge, shell_quote
from pooled_mlx.connect.target import Surroundings
from pooled_mlx.connect.write import ConnectError, Record, launch, write_changes
from pooled_mlx.mac.places import places

OPEN = Target("http://127.0.0.1:8080", "pooled/qwen3.6-35b-moe", 131_072)
SMALL = Target("http://127.0.0.1:9000", "pooled/smollm2-135m", 8_192, "se'cret")
NAMES = sorted(AGENTS)


def places_of(home: Path, folder: Path, **env: str) -> tuple[Surroundings, Record]:
    return Surroundings(env, home, folder), Record(home / ".config/pooled-mlx/connect.json")


def test_limits() -> None:
    assert (OPEN.output_tokens, OPEN.compact_tokens) == (16_384, 98_304)
    assert (SMALL.output_tokens, SMALL.compact_tokens) == (1_024, 6_144)
    assert Target("x", "m", 32_768).output_tokens == 4_096
    assert Target("x", "m", 262_144).output_tokens == 16_384
    assert (OPEN.key, SMALL.key) == ("pooled", "se'cret")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", [OPEN, SMALL])
def test_every_profile_names_the_server_and_the_model(name: str, target: Target) -> None:
    profile = profile_of(name, target)
    assert profile.name == name
    assert target.base_url in profile.text
    assert profile.install
    if name != "open-webui":
        assert target.model_id in profile.text
    if target.token is not None and name not in ("codex", "open-webui", "curl", "cline", "claude"):
        assert target.token in profile.text
    texts = [change.merge(None) for change in profile.changes]
    for text in texts:
        assert target.model_id in text
    assert profile.launch is not None
    started = json.dumps([profile.launch.argv, dict(profile.launch.env), dict(profile.launch.files)])
    assert target.base_url in started


def test_claude() -> None:
    env = profile_of("claude", OPEN).launch.env  # type: ignore[union-attr]
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {OPEN.model_id, ""}
    assert env["CLAUDE_CODE_SUBAGENT_MODEL"] == ""
    assert env["ENABLE_TOOL_SEARCH"] == "false"
    small = profile_of("claude", SMALL)
    assert "ENABLE_TOOL_SEARCH" not in small.launch.env  # type: ignore[union-attr]
    written = json.loads(small.changes[0].merge('{"env": {"OTHER": "1"}, "permissions": {"allow": ["Read"]}}'))
    assert written["env"]["OTHER"] == "1"
    assert written["permissions"] == {"allow": ["Read"], "deny": ["WebSearch"]}
    assert written["env"]["ANTHROPIC_AUTH_TOKEN"] == "se'cret"


def test_codex() -> None:
    config = tomllib.loads(profile_of("codex", OPEN).changes[0].merge(None))
    assert config["model"] == OPEN.model_id
    assert config["model_context_window"] == 131_072
    assert config["model_auto_compact_token_limit"] == 98_304
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:8080/v1"
    assert provider["wire_api"] == "responses"
    assert "env_key" not in provider
    with_token = tomllib.loads(profile_of("codex", SMALL).changes[0].merge(None))
    assert with_token["model_providers"]["pooled"]["env_key"] == "POOLED_TOKEN"
    assert "se'cret" not in profile_of("codex", SMALL).text
    start = profile_of("codex", SMALL).launch
    assert start is not None
    assert start.env["POOLED_TOKEN"] == "se'cret"
    overrides = dict(word.split("=", 1) for word in start.argv if "=" in word)
    assert tomllib.loads(f"x = {overrides['model_providers.pooled.base_url']}")["x"] == "http://127.0.0.1:9000/v1"


def test_opencode() -> None:
    config = json.loads(profile_of("opencode", OPEN).changes[0].merge('{"theme": "dark", "provider": {"other": {}}}'))
    assert config["theme"] == "dark"
    assert set(config["provider"]) == {"other", "pooled"}
    provider = config["provider"]["pooled"]
    assert provider["models"][OPEN.model_id]["limit"] == {"context": 131_072, "output": 16_384}
    assert config["model"] == config["small_model"] == f"pooled/{OPEN.model_id}"


def test_qwen_model_is_replaced_not_doubled() -> None:
    change = profile_of("qwen", OPEN).changes[0]
    once = change.merge('{"modelProviders": {"openai": [{"id": "other"}]}, "ui": {"theme": "x"}}')
    twice = json.loads(change.merge(once))
    assert [model["id"] for model in twice["modelProviders"]["openai"]] == [OPEN.model_id, "other"]
    assert twice["ui"] == {"theme": "x"}
    assert json.loads(once) == twice


def test_yaml_profiles_are_yaml() -> None:
    for name in ("continue", "litellm"):
        for target in (OPEN, SMALL):
            assert yaml.safe_load(profile_of(name, target).changes[0].merge(None))
    model = yaml.safe_load(profile_of("continue", SMALL).changes[0].merge(None))["models"][0]
    assert (model["apiBase"], model["apiKey"], model["model"]) == ("http://127.0.0.1:9000/v1", "se'cret", SMALL.model_id)
    config = yaml.safe_load(profile_of("aider", SMALL).changes[0].merge("dark-mode: true\nmodel: gpt-4o\n# end\n"))
    assert (config["model"], config["dark-mode"]) == (f"openai/{SMALL.model_id}", True)
    assert config["openai-api-key"] == "se'cret"


def test_open_webui_in_docker_names_host_and_token() -> None:
    text = profile_of("open-webui", OPEN).text
    assert "--allow-host host.docker.internal:8080" in text
    assert "POOLED_TOKEN=" in text


def test_curl_is_three_commands_that_a_shell_reads() -> None:
    text = profile_of("curl", SMALL).text
    assert text.count("curl http://127.0.0.1:9000/v1/") == 3
    assert text.count("authorization: Bearer se'\\''cret") == 3
    assert "authorization" not in profile_of("curl", OPEN).text


def test_the_banner_has_the_three_main_agents_and_no_token() -> None:
    text = "\n".join(banner_lines("http://127.0.0.1:8080", OPEN.model_id, 32_768, has_token=True))
    for wanted in ("Claude Code", "Codex", "opencode", "CLAUDE_CODE_ATTRIBUTION_HEADER=0", "YOUR_TOKEN", "32768", "4096"):
        assert wanted in text
    assert "--url" not in text
    elsewhere = "\n".join(banner_lines("http://127.0.0.1:8098", "m", 32_768, has_token=False))
    assert "env_key" not in elsewhere
    assert elsewhere.count("--url http://127.0.0.1:8098") == 4


def test_shell_words() -> None:
    assert shell_quote("plain/word:1") == "plain/word:1"
    assert shell_quote("it's") == "'it'\\''s'"
    assert shell_quote("") == "''"


@pytest.mark.parametrize("old", ["{ // comment\n}", "[1]", "{broken"])
def test_files_that_cannot_be_merged_are_left_alone(old: str) -> None:
    with pytest.raises(CannotMerge):
        JsonMerge({"a": 1})(old)


def test_flat_yaml_keeps_lines_and_order() -> None:
    merge = YamlMerge({"b": 2, "c": True, "d": "x y"})
    assert merge("# mine\na: 1\nb: 9\n") == "# mine\na: 1\nb: 2\nc: true\nd: x y\n"
    assert merge(None) == "b: 2\nc: true\nd: x y\n"


def test_writing_keeps_a_backup_and_is_repeatable(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    (home / ".claude").mkdir(parents=True)
    folder.mkdir()
    settings = home / ".claude/settings.json"
    settings.write_text('{"theme": "dark"}')
    settings.chmod(0o640)
    changes = profile_of("claude", OPEN).changes
    (first,) = write_changes(changes, *places_of(home, folder))
    assert first.changed
    assert first.backup is not None
    assert first.backup.read_text() == '{"theme": "dark"}'
    assert json.loads(settings.read_text())["theme"] == "dark"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o640
    (second,) = write_changes(changes, *places_of(home, folder))
    assert not second.changed
    assert len(list(settings.parent.iterdir())) == 2


def test_a_new_file_is_the_owners_alone(tmp_path: Path) -> None:
    (written,) = write_changes(profile_of("litellm", SMALL).changes, *places_of(tmp_path, tmp_path))
    assert written.path == tmp_path / "litellm-pooled.yaml"
    assert written.backup is None
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    (tmp_path / ".claude").mkdir()
    link = tmp_path / ".claude/settings.json"
    link.symlink_to(real)
    write_changes(profile_of("claude", OPEN).changes, *places_of(tmp_path, tmp_path))
    assert link.is_symlink()
    assert "ANTHROPIC_MODEL" in real.read_text()


def test_nothing_is_written_when_one_file_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{ // mine\n}")
    changes = (FileChange("new.json", JsonMerge({"a": 1})), FileChange("bad.json", JsonMerge({"a": 1})))
    with pytest.raises(ConnectError, match=r"bad\.json was not changed"):
        write_changes(changes, *places_of(tmp_path, tmp_path))
    assert not (tmp_path / "new.json").exists()


def test_launch_gives_files_environment_and_arguments(tmp_path: Path) -> None:
    script = (
        "import json, os, sys; json.dump([sys.argv[2:], open(sys.argv[1]).read(), os.environ['WHERE']], open(sys.argv[2], 'w'))"
    )
    start = Launch((sys.executable, "-c", script, "@TEMPORARY@/in/a.txt"), {"WHERE": "@TEMPORARY@/x"}, {"in/a.txt": "text"})
    out = tmp_path / "out.json"
    assert launch(start, [str(out), "more"], "pip install it", "127.0.0.1") == 0
    arguments, text, where = json.loads(out.read_text())
    assert arguments == [str(out), "more"]
    assert text == "text"
    assert where.endswith("/x")
    assert not Path(where).parent.exists()


def test_a_missing_program_is_named_with_its_install_command() -> None:
    with pytest.raises(ConnectError, match="npm install -g it"):
        launch(Launch(("no-such-program-here",)), [], "npm install -g it", "127.0.0.1")


class _Models(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, str] = (200, "")
    seen: str | None = None

    def do_GET(self) -> None:
        type(self).seen = self.headers.get("Authorization")
        status, text = self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Models) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_the_running_server_is_asked(server: str) -> None:
    _Models.answer = (200, '{"data": [{"id": "pooled/m", "context_length": 4096}]}')
    assert find_target(f"{server}/v1/", "tok", None, None) == Target(server, "pooled/m", 4096, "tok")
    assert _Models.seen == "Bearer tok"
    assert find_target(server, None, "other", 1024) == Target(server, "other", 1024)
    _Models.answer = (401, "{}")
    with pytest.raises(ConnectError, match="POOLED_TOKEN"):
        find_target(server, None, None, None)
    _Models.answer = (200, "<html>")
    with pytest.raises(ConnectError, match="did not answer as pooled-mlx"):
        find_target(server, None, None, None)


def test_no_server_and_no_address() -> None:
    with pytest.raises(ConnectError, match="pooled-mlx serve"):
        find_target("http://127.0.0.1:9", None, None, None)
    with pytest.raises(ConnectError, match="no address"):
        find_target("127.0.0.1:8080", None, None, None)


def test_settings_and_the_token_of_the_service_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("POOLED_TOKEN", raising=False)
    folder = tmp_path / "config" / "pooled-mlx"
    folder.mkdir(parents=True)
    assert find_server(None, None, None) == ("http://127.0.0.1:8080", None)
    (folder / "config.toml").write_text("port = 9001\n")
    (folder / "token").write_text("of-the-service\n")
    own = tmp_path / "own"
    own.write_text("of-a-file\n")
    assert find_server(None, None, None) == ("http://127.0.0.1:9001", "of-the-service")
    assert find_server("http://localhost:9002/v1", None, None) == ("http://localhost:9002/v1", "of-the-service")
    assert find_server("http://192.0.2.1:8080", None, None) == ("http://192.0.2.1:8080", None)
    assert find_server(None, str(own), "of-a-flag")[1] == "of-a-file"
    assert find_server(None, None, "of-a-flag")[1] == "of-a-flag"
    monkeypatch.setenv("POOLED_TOKEN", "of-the-environment")
    assert find_server(None, None, None)[1] == "of-the-environment"
    with pytest.raises(ConnectError, match="cannot read the token file"):
        find_server(None, str(tmp_path / "missing"), None)
    (folder / "config.toml").write_text("prot = 9001\n")
    with pytest.raises(ConnectError, match="port"):
        find_server(None, None, None)


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_the_token_is_looked_for_where_the_service_keeps_it(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    kept = places(tmp_path, platform).token_file
    kept.parent.mkdir(parents=True)
    kept.write_text("of-the-service\n")
    monkeypatch.delenv("POOLED_TOKEN", raising=False)
    assert find_server(None, None, None)[1] == "of-the-service"


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["connect", "--model", "pooled/m", "--context", "8192", *words])
    return args.run(args)


def test_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("opencode") == 0
    assert "pooled/pooled/m" in capsys.readouterr().out


def test_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("POOLED_TOKEN", "from-environment")
    assert command("pi", "--write") == 0
    said = capsys.readouterr().out
    assert "written" in said
    assert "Start it with: pi --provider pooled --model pooled/m" in said
    models = json.loads((tmp_path / ".pi/agent/models.json").read_text())
    assert models["providers"]["pooled"]["apiKey"] == "from-environment"
    assert command("curl", "--write") == 1
    assert "no configuration file" in capsys.readouterr().err


def test_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "claude"
    program.write_text(f'#!/bin/sh\necho "$ANTHROPIC_MODEL $*" > {tmp_path}/said\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert command("claude", "--run", "-p", "hi", "--url", "its own") == 7
    said = (tmp_path / "said").read_text()
    assert said.startswith("pooled/m --settings ")
    assert said.endswith(" -p hi --url its own\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert command("claude", "--run") == 1
    assert "npm install" in capsys.readouterr().err


def test_the_page_about_agents_names_all_of_them_with_the_versions_that_were_checked() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/agents.md").read_text(encoding="utf-8")
    for name in AGENTS:
        assert f"| `{name}` |" in page
    checks = (root / "scripts/agents/agent_checks.py").read_text(encoding="utf-8")
    versions = re.findall(r'package="[^"]*[@=]([\d.]+)"', checks)
    assert len(versions) == 8
    for version in versions:
        assert f"| {version} |" in page
