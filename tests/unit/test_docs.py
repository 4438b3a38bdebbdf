"""Generated pages equal their source, and the texts speak of things that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docs as docs_script  # noqa: E402

PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)


@pytest.mark.parametrize("name", list(docs_script.PAGES))
def test_generated_pages_are_current(name: str):
    assert (ROOT / "docs" / name).read_text() == docs_script.PAGES[name](), "run: make docs"


def test_readme_begins_with_the_two_commands():
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.strip()]
    assert lines[1].startswith("make serve ")
    assert lines[2].startswith("make test ")


def test_readme_names_the_default_of_each_mac():
    from pooled_mlx.catalog import builtin_folder, load_catalog
    from pooled_mlx.choice import pick_default
    from tests.mac_devices import MACS

    text = (ROOT / "README.md").read_text().lower()
    for facts in MACS:
        label = pick_default(load_catalog(builtin_folder()), facts).label
        assert label.removesuffix(" 8-bit").replace(" ", "-").lower() in text, facts.name


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", PAGES)
def test_named_commands_and_flags_exist(name: str):
    from pooled_mlx.cli import COMMANDS
    from pooled_mlx.config import TABLE

    text = (ROOT / name).read_text()
    for command in re.findall(r"`pooled-mlx ([a-z]+)", text):
        assert command in COMMANDS, f"{name}: pooled-mlx {command}"
    for variable in re.findall(r"POOLED_MLX_[A-Z_]*[A-Z]", text):
        assert variable in {row.env for row in TABLE.values()}, f"{name}: {variable}"


def test_every_target_of_the_makefile_is_explained():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE)) - {"help", "setup", "clean"}
    assert targets == set(re.findall(r'echo "make ([a-z]+)', makefile))


def test_tests_that_the_architecture_names_exist():
    for name in re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()):
        assert (ROOT / name).exists(), name
