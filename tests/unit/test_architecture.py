"""The rules of ARCHITECTURE.md, read off the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pooled_mlx"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "core": set(),
    "log": set(),
    "metrics": {"core"},
    "catalog": {"core"},
    "choice": {"core", "catalog"},
    "config": {"core", "catalog"},
    "text": {"core"},
    "grammar": {"core", "text"},
    "chat_formats": {"core", "text", "grammar"},
    "api": {"core"},
    "store": {"core", "catalog"},
    "prompt": {"core", "chat_formats", "text", "grammar"},
    "runner": {"core"},
    "engine": {"core", "prompt", "chat_formats", "text", "grammar"},
    "replay": {"core", "prompt", "engine", "runner", "grammar"},
    "server": {"core", "api", "catalog", "config"},
    "page": {"core"},
    "connect": {"core", "catalog", "config"},
    "mac": {"core", "catalog", "config"},
    "cli": None,
    "__init__": set(),
    "__main__": {"cli"},
}
"""Part -> the other parts that it may import; None: all of them."""

ONLY_IN = {
    "mlx": {"runner", "replay/tiny_model", "store/gguf"},
    "mlx_lm": {"runner", "replay/tiny_model"},
    "quart": {"server"},
    "hypercorn": {"server"},
    "werkzeug": {"server"},
    "pydantic": {"api"},
    "rumps": {"mac"},
    "huggingface_hub": {"store"},
    "llguidance": {"grammar"},
    "transformers": {"prompt"},
}
"""Library -> the parts, or single files, that may import it: those two make weights, and never see a cache."""

WITHOUT_MLX = ("prompt.prompt", "prompt.tokens", "core.cuts", "core.memory", "engine.pool", "engine.eviction", "runner.devices")
"""Modules that load without MLX."""

FORBIDDEN_NAMES = ("Manager", "Helper", "Util")


def part_of(module: str) -> str:
    """The part of the package that a dotted module name belongs to."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module of a file, also those inside functions and type-checking blocks, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "pooled_mlx":
                for alias in node.names:
                    known = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").exists()
                    yield (f"pooled_mlx.{alias.name}" if known else module), node.lineno
            else:
                yield module, node.lineno


def where(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_every_part_has_its_rule():
    parts = {where(path) for path in SOURCES}
    assert parts <= set(MAY_IMPORT), parts - set(MAY_IMPORT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path):
    part = where(path)
    allowed = MAY_IMPORT[part]
    for module, line in imports(path):
        library = module.partition(".")[0]
        if library == "pooled_mlx":
            target = part_of(module)
            if allowed is not None and target not in (part, "__init__"):
                assert target in allowed, f"{path}:{line}: {part} must not import {module}"
        elif library in ONLY_IN:
            file = str(path.relative_to(PACKAGE).with_suffix(""))
            assert {part, file} & ONLY_IN[library], (
                f"{path}:{line}: only {', '.join(sorted(ONLY_IN[library]))} may import {library}"
            )


WITHOUT_CIRCLES = ("core", "prompt", "engine", "runner", "replay")
MOST_ENGINE_FILES, MOST_ENGINE_LEVELS = 15, 10  # fourteen, and drafts.py, which came later


def files_of(part: str) -> dict[str, set[str]]:
    """Module -> the modules of the same part that it imports."""
    paths = {path.stem: path for path in SOURCES if where(path) == part and path.stem != "__init__"}
    prefix = f"pooled_mlx.{part}."
    return {
        name: {module.removeprefix(prefix) for module, _ in imports(path) if module.removeprefix(prefix) in paths} - {name}
        for name, path in paths.items()
    }


def levels(files: dict[str, set[str]]) -> dict[str, int]:
    """How many modules of the part stand below each one, in the longest row. Fails where they go round."""
    height: dict[str, int] = {}
    while len(height) < len(files):
        ready = [name for name, below in files.items() if name not in height and below <= height.keys()]
        assert ready, f"these import one another in a circle: {sorted(files.keys() - height.keys())}"
        height |= {name: 1 + max((height[below] for below in files[name]), default=0) for name in ready}
    return height


@pytest.mark.parametrize("part", WITHOUT_CIRCLES)
def test_no_files_import_one_another_in_a_circle(part: str):
    assert max(levels(files_of(part)).values()) >= 1


def test_the_engine_can_be_read_from_the_bottom_up():
    files = files_of("engine")
    assert len(files) <= MOST_ENGINE_FILES
    assert max(levels(files).values()) <= MOST_ENGINE_LEVELS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(FORBIDDEN_NAMES), f"{path}:{node.lineno}: class {node.name}"


def loaded_after(code: str) -> set[str]:
    """Names of the libraries in memory after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_package_loads_no_mlx_and_no_web_framework():
    assert not {"mlx", "mlx_lm", "quart", "hypercorn", "transformers", "pydantic", "numpy"} & loaded_after("import pooled_mlx")


def test_wire_formats_load_no_mlx():
    code = "import pooled_mlx.api.chat_completions, pooled_mlx.api.responses, pooled_mlx.api.messages, pooled_mlx.store"
    assert not {"mlx", "mlx_lm", "quart", "hypercorn", "transformers"} & loaded_after(code)


def test_the_pure_part_of_the_engine_loads_no_mlx():
    code = "; ".join(f"import pooled_mlx.{name}" for name in WITHOUT_MLX)
    assert not {"mlx", "mlx_lm", "quart", "hypercorn"} & loaded_after(code)


def test_the_server_loads_no_mlx():
    assert not {"mlx", "mlx_lm", "transformers"} & loaded_after("import pooled_mlx.server.app, pooled_mlx.server.serve")


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['pooled-mlx', '--help']\nfrom pooled_mlx.cli import main\n"
        "import contextlib, io\nwith contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()"
    )
    heavy = {
        "mlx",
        "mlx_lm",
        "quart",
        "hypercorn",
        "transformers",
        "pydantic",
        "numpy",
        "rich",
        "huggingface_hub",
        "psutil",
        "asyncio",
    }
    assert not heavy & loaded_after(code)


FORBIDDEN_TEXT = re.compile(r"\b(TODO|FIXME|XXX)\b|/work/|/tmp/w/|/root/")
"""Unfinished things and places of one machine."""


def test_no_unfinished_business_and_no_machine_paths():
    texts = [
        path
        for folder in ("pooled_mlx", "tests", "scripts", "models", "docs", "benchmarks")
        for path in (ROOT / folder).rglob("*")
    ]
    texts += [
        ROOT / name
        for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        if path.suffix in (".py", ".md", ".toml", ".html", ".jinja", ".json", ".sh", "")
        and path.is_file()
        and "__pycache__" not in path.parts
        and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if FORBIDDEN_TEXT.search(line)
    ]
    assert found == []
