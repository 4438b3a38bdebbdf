"""The script that tries the tests with harmful changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import mutants

TABLE = """
["a sum is a difference"]
file = "sums.py"
old = "a + b"
new = "a - b"
tests = ["test_sums.py::test_sum"]

["nobody looks"]
file = "sums.py"
old = "a * b"
new = "a / b"
tests = ["test_sums.py::test_sum"]

["the code has moved"]
file = "sums.py"
old = "a % b"
new = "a"
tests = ["test_sums.py::test_sum"]

["it cannot be read any more"]
file = "sums.py"
old = "def product"
new = "def product("
tests = ["test_sums.py::test_sum"]
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module and its test."""
    (tmp_path / "sums.py").write_text("def sum(a, b):\n    return a + b\n\n\ndef product(a, b):\n    return a * b\n")
    (tmp_path / "test_sums.py").write_text("from sums import sum\n\n\ndef test_sum():\n    assert sum(2, 3) == 5\n")
    (tmp_path / "table.toml").write_text(TABLE)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "table.toml")
    return tmp_path


def test_each_change_has_its_outcome(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (checkout / "sums.py").read_text()
    assert mutants.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    outcomes = ["noticed    a sum", "UNNOTICED  nobody looks", "stale      the code has moved", "NO RESULT  it cannot"]
    assert [line[: len(outcome)] for line, outcome in zip(lines, outcomes, strict=False)] == outcomes
    assert "0 times in sums.py" in lines[2]
    assert lines[-1] == "1 of 4 changes were noticed."
    assert (checkout / "sums.py").read_text() == before
    assert mutants.main(["difference"]) == 0


def test_a_test_that_fails_without_any_change_ends_it(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "sums.py").write_text("def sum(a, b):\n    return 0\n")
    assert mutants.main(["difference"]) == 1
    assert "must pass before anything is changed" in capsys.readouterr().out


def test_a_table_without_a_needed_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[one\] has no old, tests"):
        mutants.read_table('[one]\nfile = "a.py"\nnew = "x"\n')
    with pytest.raises(ValueError, match=r"\[one\] has no tests"):
        mutants.read_table('[one]\nfile = "a.py"\nold = "x"\nnew = "y"\ntests = []\n')


def test_the_table_can_be_read() -> None:
    assert len(mutants.read_table(mutants.TABLE.read_text())) >= 12
