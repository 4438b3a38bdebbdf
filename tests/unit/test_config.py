from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.config import (
    TABLE,
    ConfigError,
    Loaded,
    Settings,
    add_flags,
    check_host,
    config_file,
    is_loopback,
    load_settings,
    resolve_token,
    shown,
    token_file_is_open,
)


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "pooled-mlx").mkdir()
    return tmp_path / "pooled-mlx" / "config.toml"


def load(*flags: str, env: dict[str, str] | None = None) -> Loaded:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_settings(vars(parser.parse_args(flags)), env or {})


def test_defaults():
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origin.values()) == {"default"}
    settings = loaded.settings
    assert (settings.host, settings.port, settings.max_queue, settings.max_running) == ("127.0.0.1", 8080, 8, 4)


def test_flag_over_environment_over_file_over_default(own_config: Path):
    own_config.write_text("port = 1111\nmax_queue = 2\nmax_running = 3\n")
    loaded = load("--port", "3333", env={"POOLED_MLX_PORT": "2222", "POOLED_MLX_MAX_QUEUE": "5"})
    settings = loaded.settings
    assert (settings.port, settings.max_queue, settings.max_running, settings.quiet) == (3333, 5, 3, False)
    assert loaded.origin["port"] == "flag"
    assert loaded.origin["max_queue"] == "POOLED_MLX_MAX_QUEUE"
    assert loaded.origin["max_running"] == str(own_config)
    assert loaded.origin["quiet"] == "default"


@pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
def test_every_setting_can_be_set_in_each_place(row: Any, own_config: Path):
    value: Any = {str: "x", int: 1000, float: 0.5, bool: True}[row.kind]
    if row.choices:
        value = row.choices[0]
    elif row.low is not None and not row.low <= value <= (row.high or value):
        value = row.low
    if row.size:
        value = 2**30
    if row.name == "deterministic":
        assert load("--deterministic").settings.max_running == 1
        return
    expected = ("x",) if row.many else value
    flag = [row.flag] if row.kind is bool else [row.flag, str(value)]
    assert getattr(load(*flag).settings, row.name) == expected
    assert getattr(load(env={row.env: str(value)}).settings, row.name) == expected
    text = '["x"]' if row.many else f'"{value}"' if row.kind is str else str(value).lower()
    own_config.write_text(f"{row.name} = {text}\n")
    assert getattr(load().settings, row.name) == expected


def test_lists_and_negated_flags(own_config: Path):
    own_config.write_text("quiet = true\n")
    settings = load(
        "--no-quiet", "--allow-host", "a:1", "--allow-host", "b:2", env={"POOLED_MLX_ALLOW_ORIGIN": "http://x,http://y"}
    ).settings
    assert settings.quiet is False
    assert settings.allow_host == ("a:1", "b:2")
    assert settings.allow_origin == ("http://x", "http://y")


def test_sizes():
    assert load("--pool-bytes", "6 GiB").settings.pool_bytes == 6 * 2**30
    assert load(env={"POOLED_MLX_MEMORY_LIMIT": "24GB"}).settings.memory_limit == 24 * 10**9


@pytest.mark.parametrize(
    ("flags", "env", "text", "message"),
    [
        ([], {}, "prot = 1", r"config\.toml: unknown setting 'prot'\. Did you mean 'port'\?"),
        ([], {"POOLED_MLX_PROT": "1"}, "", r"unknown variable POOLED_MLX_PROT\. Did you mean 'POOLED_MLX_PORT'\?"),
        (["--port", "many"], {}, "", r"--port: 'many' is not a whole number"),
        (["--port", "70000"], {}, "", r"--port: 70000 must be between 0 and 65535"),
        ([], {"POOLED_MLX_MAX_RUNNING": "0"}, "", r"POOLED_MLX_MAX_RUNNING: 0 must be between 1 and 256"),
        ([], {}, "port = 80.5", r"config\.toml: port: 80\.5 is not a whole number"),
        ([], {}, "port = true", r"port: True is not a whole number"),
        ([], {}, 'quiet = "maybe"', r"quiet: 'maybe' is not true or false"),
        ([], {}, "host = 5", r"host: 5 is not a text"),
        ([], {}, "host = ['a']", r"host: \['a'\] is not a text"),
        ([], {}, 'log_level = "loud"', r"log_level: 'loud' is not one of debug, info, warning, error"),
        (["--pool-bytes", "big"], {}, "", r"--pool-bytes: 'big' is not a size such as 4 GiB"),
        ([], {}, "port = ", r"config\.toml is not valid TOML"),
        (["--config", "/nowhere/x.toml"], {}, "", r"there is no settings file /nowhere/x\.toml"),
        (["--deterministic", "--max-running", "2"], {}, "", r"deterministic needs max_running 1, which is set to 2 \(flag\)"),
    ],
)
def test_errors_name_the_place_the_value_and_the_limit(flags: list[str], env: dict, text: str, message: str, own_config: Path):
    own_config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(*flags, env=env)


def test_an_empty_variable_is_not_set():
    assert load(env={"POOLED_MLX_PORT": ""}).settings.port == 8080


def test_dashes_in_the_file_are_fine(own_config: Path):
    own_config.write_text("max-queue = 3\n")
    assert load().settings.max_queue == 3


def test_another_file(tmp_path: Path):
    path = tmp_path / "other.toml"
    path.write_text("port = 4444\n")
    assert load("--config", str(path)).settings.port == 4444


def test_config_file_respects_xdg(own_config: Path):
    assert config_file() == own_config


def test_token_order(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("  from-file\n")
    everything = ["--token", "from-flag", "--token-file", str(file)]
    assert resolve_token(load(*everything, env={"POOLED_TOKEN": "from-env"}).settings) == "from-file"
    assert resolve_token(load("--token", "from-flag", env={"POOLED_TOKEN": "from-env"}).settings) == "from-env"
    assert resolve_token(load("--token", "from-flag").settings) == "from-flag"
    assert resolve_token(load().settings) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the token file"), ("\n", "is empty"), ("a b", "printable ASCII"), ("é", "printable ASCII")],
)
def test_bad_token_file(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve_token(Settings(token_file=str(tmp_path / "token")))


def test_token_file_that_others_can_read(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("x")
    os.chmod(path, 0o644)
    assert token_file_is_open(Settings(token_file=str(path)))
    os.chmod(path, 0o600)
    assert not token_file_is_open(Settings(token_file=str(path)))
    assert not token_file_is_open(Settings())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_token(host: str):
    check_host(Settings(host=host), None)
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_hosts_need_a_token(host: str):
    with pytest.raises(ConfigError, match=f"--host {host} lets other machines in, and no token is set"):
        check_host(Settings(host=host), None)
    check_host(Settings(host=host), "secret")
    assert not is_loopback(host)


def test_secrets_are_never_shown():
    assert shown(TABLE["token"], "hunter2") == "(set)"
    with pytest.raises(ConfigError) as caught:
        TABLE["token"].parse(["hunter2"], "file: token")
    assert "hunter2" not in str(caught.value)
    assert shown(TABLE["quiet"], False) == "false"
    assert shown(TABLE["allow_host"], ("a", "b")) == "a, b"
    assert shown(TABLE["model"], None) == "-"
