"""What the user has set elsewhere: it never sends prompts to another server, is never lost, and is named where it wins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pooled_mlx.connect import AGENTS, CannotMerge, FileChange, Launch, Target, profile_of
from pooled_mlx.connect.command import find_target
from pooled_mlx.connect.merge import JsonMerge, Replacing, YamlMerge
from pooled_mlx.connect.target import Surroundings
from pooled_mlx.connect.write import ConnectError, Record, launch, locate, undo_changes, write_changes
from tests.unit.test_connect import _Models, command, server

__all__ = ["server"]

TARGET = Target("http://127.0.0.1:8080", "pooled/qwen3.6-35b-moe", 131_072)
OTHER = "https://other.example/v1"


class World:
    """A home with a project in it."""

    def __init__(self, root: Path) -> None:
        self.home, self.project = root / "home", root / "home/project"
        (self.project / ".git").mkdir(parents=True)
        self.record = Record(self.home / ".config/pooled-mlx/connect.json")

    def around(self, **env: str) -> Surroundings:
        return Surroundings(env, self.home, self.project)

    def put(self, path: str, text: str) -> Path:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- --run


def started(name: str, target: Target = TARGET) -> Launch:
    start = profile_of(name, target).launch
    assert start is not None
    return start


def test_claude_settings_of_ours_win_over_files_that_set_variables() -> None:
    start = started("claude")
    assert start.argv[1:] == ("--settings", "@TEMPORARY@/settings.json")  # a file: other users see the arguments
    settings = json.loads(start.files["settings.json"])
    assert settings["env"] == dict(start.env)
    assert settings["env"]["ANTHROPIC_BASE_URL"] == TARGET.base_url
    assert all(settings["env"][name] == "" for name in ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"))
    assert settings["permissions"] == {"deny": ["WebSearch"]}
    assert "ANTHROPIC_API_KEY" in start.without


def test_an_organisations_settings_that_nothing_beats_are_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    managed = tmp_path / "managed-settings.d/10.json"
    managed.parent.mkdir()
    monkeypatch.setattr("pooled_mlx.connect.claude._MANAGED", (str(tmp_path),))
    around = Surroundings({}, tmp_path, tmp_path)
    profile = profile_of("claude", TARGET)
    assert profile.managed(around) == []
    managed.write_text(json.dumps({"env": {"ANTHROPIC_BASE_URL": OTHER}}))
    (line,) = profile_of("claude", TARGET).managed(around)
    assert OTHER in line
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("claude", "--run") == 1


def test_aider_is_told_by_flags_under_every_name_that_it_reads() -> None:
    start = started("aider")
    words = list(start.argv)
    assert words[words.index("--openai-api-base") + 1] == TARGET.openai_url
    sets = [words[place + 1] for place, word in enumerate(words) if word == "--set-env"]
    assert sets == [f"OPENAI_API_BASE={TARGET.openai_url}", f"OPENAI_BASE_URL={TARGET.openai_url}"]
    for name in ("--model", "--weak-model", "--editor-model"):
        assert words[words.index(name) + 1] == f"openai/{TARGET.model_id}"
    assert start.env["OPENAI_BASE_URL"] == start.env["OPENAI_API_BASE"] == TARGET.openai_url


def test_opencode_can_ask_no_other_provider() -> None:
    content = json.loads(started("opencode").env["OPENCODE_CONFIG_CONTENT"])
    assert content["enabled_providers"] == ["pooled"]
    assert "enabled_providers" not in json.loads(profile_of("opencode", TARGET).changes[0].merge(None))


def test_no_proxy_stands_before_the_server_and_foreign_keys_stay_at_home(tmp_path: Path) -> None:
    out = tmp_path / "env.json"
    script = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    env = {**os.environ, "HTTP_PROXY": "http://proxy.example:3128", "NO_PROXY": "intern.example", "SECRET": "x", "HERE": "old"}
    start = Launch((sys.executable, "-c", script), {"HERE": "new"}, without=("SECRET",))
    assert launch(start, [], "", "studio.local", env) == 0
    seen = json.loads(out.read_text())
    assert seen["NO_PROXY"] == "intern.example,studio.local,127.0.0.1,localhost"
    assert seen["no_proxy"].endswith("studio.local,127.0.0.1,localhost")
    assert seen["HERE"] == "new"
    assert "SECRET" not in seen


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("claude", ["--settings", "mine.json"]),
        ("claude", ["--settings=mine.json"]),
        ("aider", ["--openai-api-base", OTHER]),
        ("pi", ["--provider", "anthropic"]),
        ("continue", ["--config", "mine.yaml"]),
    ],
)
def test_an_argument_that_would_undo_ours_is_refused(name: str, words: list[str]) -> None:
    with pytest.raises(ConnectError, match="cannot be given behind --run"):
        launch(started(name), words, "", "127.0.0.1")


# --- what wins over --write


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("claude", "project/.claude/settings.json", json.dumps({"env": {"ANTHROPIC_BASE_URL": OTHER}})),
        ("claude", "project/.claude/settings.local.json", json.dumps({"env": {"CLAUDE_CODE_USE_BEDROCK": "1"}})),
        ("aider", "project/.aider.conf.yml", f"openai-api-base: {OTHER}\n"),
        ("aider", "project/.env", f"export OPENAI_BASE_URL='{OTHER}'\n"),
        ("aider", ".env", f"OPENAI_API_BASE={OTHER}\n"),
        ("opencode", "project/opencode.json", json.dumps({"model": "anthropic/claude"})),
        ("opencode", "project/opencode.jsonc", '{ // mine\n "model": "anthropic/claude" }'),
        ("qwen", "project/.qwen/settings.json", json.dumps({"security": {"auth": {"selectedType": "qwen-oauth"}}})),
        ("qwen", "project/.qwen/.env", f"OPENAI_BASE_URL={OTHER}\n"),
    ],
)
def test_files_that_win_are_named(name: str, path: str, text: str, world: World) -> None:
    profile = profile_of(name, TARGET)
    assert profile.stronger(world.around()) == []
    file = world.put(path, text)
    (line,) = profile.stronger(world.around())
    assert str(file) in line


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("aider", "OPENAI_BASE_URL", OTHER),
        ("aider", "OPENAI_API_BASE", OTHER),
        ("aider", "AIDER_MODEL", "gpt-5"),
        ("qwen", "OPENAI_BASE_URL", OTHER),
        ("opencode", "OPENCODE_CONFIG_CONTENT", "{}"),
    ],
)
def test_exported_variables_that_win_are_named(name: str, variable: str, value: str, world: World) -> None:
    (line,) = profile_of(name, TARGET).stronger(world.around(**{variable: value}))
    assert variable in line
    if variable.endswith(("BASE", "URL")):
        assert profile_of(name, TARGET).stronger(world.around(**{variable: TARGET.openai_url + "/"})) == []


def test_writing_what_will_not_be_used_is_no_success(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(world.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(world.home / ".config"))
    monkeypatch.chdir(world.project)
    monkeypatch.setenv("OPENAI_BASE_URL", OTHER)
    assert command("aider", "--write") == 1
    told = capsys.readouterr()
    assert "Start it with" not in told.out
    assert "OPENAI_BASE_URL is exported" in told.err
    assert "pooled-mlx connect aider --run" in told.err
    monkeypatch.delenv("OPENAI_BASE_URL")
    assert command("aider", "--write") == 0


# --- where it is written


@pytest.mark.parametrize(
    ("name", "variable", "file"),
    [
        ("claude", "CLAUDE_CONFIG_DIR", "settings.json"),
        ("codex", "CODEX_HOME", "pooled.config.toml"),
        ("opencode", "XDG_CONFIG_HOME", "opencode/opencode.json"),
        ("pi", "PI_CODING_AGENT_DIR", "models.json"),
        ("continue", "CONTINUE_GLOBAL_DIR", "pooled.yaml"),
    ],
)
def test_the_agents_own_folder_variable_decides(name: str, variable: str, file: str, world: World) -> None:
    elsewhere = world.home / "else where"
    (change,) = profile_of(name, TARGET).changes
    assert locate(change, world.around(**{variable: str(elsewhere)})) == elsewhere / file
    assert locate(change, world.around(**{variable: "~/x"})) == world.home / "x" / file
    assert locate(change, world.around()).is_relative_to(world.home)
    write_changes([change], world.around(**{variable: str(elsewhere)}), world.record)
    assert TARGET.model_id in (elsewhere / file).read_text()


def test_the_opencode_file_that_wins_is_written_or_named(world: World) -> None:
    (change,) = profile_of("opencode", TARGET).changes
    made = world.put(".config/opencode/opencode.jsonc", '{"$schema": "https://opencode.ai/config.json"}')
    write_changes([change], world.around(), world.record)
    assert json.loads(made.read_text())["model"] == f"pooled/{TARGET.model_id}"
    assert not made.with_name("opencode.json").exists()
    made.write_text('{ // my own words\n "theme": "dark" }')
    with pytest.raises(ConnectError, match=r"opencode\.jsonc was not changed.*by hand"):
        write_changes([change], world.around(), world.record)
    assert "my own words" in made.read_text()


# --- backups and undo


def test_the_users_original_is_never_written_over(world: World) -> None:
    file = world.put(".claude/settings.json", '{"theme": "dark"}')
    for port in range(3):
        changes = profile_of("claude", Target(f"http://127.0.0.1:{8080 + port}", "pooled/m", 8192)).changes
        write_changes(changes, world.around(), world.record)
    backups = list(file.parent.glob("*.before-pooled-*"))
    assert [backup.read_text() for backup in backups] == ['{"theme": "dark"}']
    file.write_text('{"theme": "light"}')
    write_changes(changes, world.around(), world.record)
    assert sorted(backup.read_text() for backup in file.parent.glob("*.before-pooled-*")) == [
        '{"theme": "dark"}',
        '{"theme": "light"}',
    ]


@pytest.mark.parametrize("name", [name for name in AGENTS if profile_of(name, TARGET).changes])
def test_undo_leaves_the_home_as_it_was(name: str, world: World) -> None:
    changes = profile_of(name, TARGET).changes
    write_changes(changes, world.around(), world.record)
    assert all("removed" in line for line in undo_changes(changes, world.around(), world.record))
    assert not any(locate(change, world.around()).exists() for change in changes)
    assert all("nothing was written" in line for line in undo_changes(changes, world.around(), world.record))


def test_undo_brings_the_old_file_back(world: World) -> None:
    text = '{"theme":   "dark", "env": {"ANTHROPIC_BASE_URL": "https://mine.example", "A": "1"}}\n'
    file = world.put(".claude/settings.json", text)
    changes = profile_of("claude", TARGET).changes
    write_changes(changes, world.around(), world.record)
    (said,) = undo_changes(changes, world.around(), world.record)
    assert said.endswith("restored")
    assert file.read_text() == text
    assert [found.name for found in file.parent.iterdir()] == ["settings.json"]


def test_undo_keeps_what_the_user_changed_since(world: World) -> None:
    original = {"env": {"ANTHROPIC_BASE_URL": "https://mine.example"}, "permissions": {"deny": ["Bash"]}}
    file = world.put(".claude/settings.json", json.dumps(original))
    changes = profile_of("claude", TARGET).changes
    write_changes(changes, world.around(), world.record)
    now = json.loads(file.read_text())
    now["theme"] = "light"
    now["env"]["ANTHROPIC_MODEL"] = "my-own"
    file.write_text(json.dumps(now))
    (said,) = undo_changes(changes, world.around(), world.record)
    assert "your later changes are kept" in said
    assert json.loads(file.read_text()) == {
        "env": {"ANTHROPIC_BASE_URL": "https://mine.example", "ANTHROPIC_MODEL": "my-own"},
        "permissions": {"deny": ["Bash"]},
        "theme": "light",
    }


def test_undo_of_a_file_of_ours_that_was_edited_is_refused_with_the_reason(world: World) -> None:
    changes = profile_of("codex", TARGET).changes
    (written,) = write_changes(changes, world.around(), world.record)
    written.path.write_text(written.path.read_text() + "# mine\n")
    with pytest.raises(ConnectError, match="changed since"):
        undo_changes(changes, world.around(), world.record)
    assert written.path.exists()


def test_the_command_undoes_without_a_server(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(world.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(world.home / ".config"))
    monkeypatch.chdir(world.project)
    assert command("codex", "--write") == 0
    assert "codex --profile pooled" in capsys.readouterr().out
    assert command("codex", "--undo") == 0
    assert "removed" in capsys.readouterr().out
    assert not (world.home / ".codex/pooled.config.toml").exists()


def test_codex_names_the_variable_of_the_token() -> None:
    assert "POOLED_TOKEN" in profile_of("codex", Target("http://127.0.0.1:8080", "m", 8192, "secret")).after
    assert "secret" not in profile_of("codex", Target("http://127.0.0.1:8080", "m", 8192, "secret")).after


# --- merges


@pytest.mark.parametrize(
    "old",
    [
        "base: &b\n  x: 1 # one\nuse: *b\nmodel: gpt\n",
        "notes: >\n  two\n  lines\nopenai-api-base:\n  https://other.example\n",
        "# only a comment\n",
        "'model': \"quoted\"\nlist: [a, b]\n",
        "",
    ],
)
def test_yaml_of_any_form_survives(old: str) -> None:
    ours: dict[str, Any] = {"model": "openai/m", "openai-api-base": "http://127.0.0.1:8080/v1", "timeout": 3600}
    merge = YamlMerge(ours)
    new = merge(old)
    assert yaml.safe_load(new) == {**(yaml.safe_load(old) or {}), **ours}
    assert merge(new) == new
    assert all(word in new for word in ("# one", "&b", "*b") if word in old)
    assert (yaml.safe_load(merge.undo(new + "mine: 1\n", new, old) or "") or {}) == {**(yaml.safe_load(old) or {}), "mine": 1}


@pytest.mark.parametrize("old", ["- a\n- b\n", "a: [\n", "text"])
def test_yaml_that_cannot_be_merged_is_left_alone(old: str) -> None:
    with pytest.raises(CannotMerge):
        YamlMerge({"a": 1})(old)


def test_lists_are_merged_once() -> None:
    merge = JsonMerge({"deny": ["WebSearch"]})
    once = merge('{"deny": ["Bash"]}')
    assert json.loads(once) == {"deny": ["WebSearch", "Bash"]}
    assert merge(once) == once


def test_a_file_of_ours_alone_is_replaced() -> None:
    assert Replacing("x")("old") == "x"
    assert FileChange("a", Replacing("x")).merge(None) == "x"


# --- what the server says


@pytest.mark.parametrize(("said", "thinks"), [({}, True), ({"thinking": True}, True), ({"thinking": False}, False)])
def test_a_model_that_does_not_think_is_not_said_to(server: str, said: dict[str, bool], thinks: bool) -> None:
    _Models.answer = (200, json.dumps({"data": [{"id": "pooled/m", "context_length": 4096, **said}]}))
    target = find_target(server, None, None, None)
    assert target.thinks == thinks
    config = json.loads(profile_of("opencode", target).changes[0].merge(None))
    assert config["provider"]["pooled"]["models"]["pooled/m"]["reasoning"] == thinks
    models = json.loads(profile_of("pi", target).changes[0].merge(None))
    assert models["providers"]["pooled"]["models"][0]["reasoning"] == thinks
