"""The workflow for a hosted Mac names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from pooled_mlx.cli import COMMANDS, build_parser
from pooled_mlx.mac.app_bundle import APP_NAME
from pooled_mlx.mac.desktop import MENUBAR_LABEL

ROOT = Path(__file__).parents[2]


def test_every_step_does_something_that_is_there():
    text = (ROOT / ".github" / "workflows" / "mac.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert {"menubar", "doctor"} <= set(re.findall(r"pooled-mlx ([a-z]+)", commands)) <= set(COMMANDS)
    for module in re.findall(r"-m (scripts\.\w+)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    deep = next(line.split()[1:] for line in commands.splitlines() if "doctor --deep" in line)
    assert build_parser(["doctor"]).parse_args(deep).report in text.partition("- name: The report of the numbers")[2]
    assert "scripts/setup.sh" in commands
    assert f"/{MENUBAR_LABEL}" in commands
    assert APP_NAME in commands
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", commands, re.MULTILINE)) <= set(targets)
    versions = {job["strategy"]["matrix"]["python"][0], *(row["python"] for row in job["strategy"]["matrix"]["include"])}
    assert versions <= {"3.11", "3.12", "3.13", "3.14"}
