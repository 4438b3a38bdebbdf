"""The built wheel: everything it needs is in it, nothing else, and it works outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pooled_mlx import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(extra: str = "") -> list[Requirement]:
    project = PROJECT["project"]
    return [Requirement(text) for text in (project["optional-dependencies"][extra] if extra else project["dependencies"])]


def pins() -> dict[str, Requirement]:
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", entry.name).lower(): entry for entry in found}


def test_every_requirement_has_an_upper_bound_and_an_exact_pin_inside_it():
    exact = pins()
    for entry in [*requirements(), *requirements("dev"), *requirements("menubar")]:
        operators = {specifier.operator for specifier in entry.specifier}
        if entry.name != "rumps":
            assert "<" in operators, f"{entry}: no upper bound"
        pin = exact[re.sub(r"[-_.]+", "-", entry.name).lower()]
        (wanted,) = pin.specifier
        assert wanted.operator == "=="
        assert entry.specifier.contains(wanted.version), f"{entry} does not allow the pinned {wanted.version}"


def test_mlx_is_chosen_by_platform():
    by_platform = {str(entry.marker): str(entry) for entry in requirements() if entry.name == "mlx"}
    assert set(by_platform) == {'sys_platform == "linux"', 'sys_platform == "darwin"'}
    assert "mlx[cpu]" in by_platform['sys_platform == "linux"']
    assert {entry.name: str(entry.specifier) for entry in requirements()}["mlx-lm"] == "<0.33,>=0.32.2"


def test_what_runs_here_is_what_the_lock_says():
    wrong = {}
    for name, pin in pins().items():
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            have = version(name)
        except Exception:
            continue
        if not pin.specifier.contains(have):
            wrong[name] = (have, str(pin.specifier))
    assert wrong == {}


def test_licence_and_python_versions():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.15"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pooled_mlx", "models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(source / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.mark.slow
def test_contents_of_the_wheel(wheel: Path):
    assert wheel.name == f"pooled_mlx-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"pooled_mlx-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"pooled_mlx-{__version__}.dist-info/entry_points.txt").decode()
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "pooled_mlx").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    expected |= {f"pooled_mlx/models/{path.name}" for path in (ROOT / "models").glob("*.toml")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "pooled-mlx = pooled_mlx.cli:main" in entry_points
    assert "Requires-Dist: mlx-lm<0.33,>=0.32.2" in metadata
    assert "Provides-Extra: menubar" in metadata
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path):
    """Unpacked elsewhere it finds its own cards, page and assets, and none of the checkout's."""
    target, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    environment = {**os.environ, "PYTHONPATH": str(target), "HOME": str(home)}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listing = json.loads(run("-m", "pooled_mlx", "models", "list", "--all", "--json"))
    assert len(listing["models"]) == len(list((ROOT / "models").glob("*.toml")))
    script = (
        "import pooled_mlx, pooled_mlx.page; from pooled_mlx.catalog import builtin_folder\n"
        "print(pooled_mlx.__file__, builtin_folder(), '<html' in pooled_mlx.page.page_html())"
    )
    assert run("-c", script).split() == [f"{target}/pooled_mlx/__init__.py", f"{target}/pooled_mlx/models", "True"]


def test_make_targets_can_be_planned():
    """`make -n` parses every target; the set-up script parses in a POSIX shell."""
    make, shell = shutil.which("make"), shutil.which("dash") or shutil.which("sh")
    if make is None or shell is None:
        pytest.skip("no make or no shell")
    for target in ("serve", "test", "check", "bench", "soak", "docs"):
        subprocess.run([make, "-n", target], cwd=ROOT, check=True, capture_output=True)
    subprocess.run([shell, "-n", "scripts/setup.sh"], cwd=ROOT, check=True)
    done = subprocess.run([make, "-n", "serve", "ARGS=--port 9"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert '--model "smollm2-135m" --port 9' in done.stdout
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
