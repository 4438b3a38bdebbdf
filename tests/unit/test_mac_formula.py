"""The Homebrew formula: its service has the rules of our own, and a release can be filled in."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PACKAGING / "fill_formula.py"), *words], capture_output=True, text=True, check=False
    )


def test_a_release_is_filled_in(tmp_path: Path) -> None:
    archive = tmp_path / "pooled_mlx-0.1.0.tar.gz"
    archive.write_bytes(b"release")
    url = "https://example.org/pooled_mlx-0.1.0.tar.gz"
    done = run(str(archive), url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("class PooledMlx < Formula\n")
    assert f'  url "{url}"\n  sha256 "{hashlib.sha256(b"release").hexdigest()}"\n' in done.stdout
    assert '  homepage "https://example.org/"\n' in done.stdout
    assert "@" not in re.sub(r"python@3\.\d+|\"\$@\"", "", done.stdout)


@pytest.mark.parametrize("url", ["http://example.org/x.tar.gz", "https://example.org/x.zip", 'https://example.org/"x.tar.gz'])
def test_addresses_that_homebrew_cannot_use(tmp_path: Path, url: str) -> None:
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(b"")
    done = run(str(archive), url)
    assert done.returncode == 1
    assert "must be an https address" in done.stderr


def test_usage() -> None:
    assert run().returncode == 2
    assert run("/nowhere.tar.gz", "https://example.org/x.tar.gz").returncode == 1


def test_it_is_installed_in_one_step_and_its_libraries_keep_their_names() -> None:
    text = (PACKAGING / "pooled-mlx.rb").read_text(encoding="utf-8")
    assert "post_install" not in text, "Homebrew 7 warns of it"
    assert re.search(r"^  preserve_rpath$", text, re.MULTILINE), "wheels have no room for other names"
    assert '"pip", "install", "--quiet", "#{buildpath}[menubar]"' in text
    assert 'exec "#{opt_libexec}/bin/pooled-mlx" "$@"' in text


def test_the_service_has_the_rules_of_our_own_agent() -> None:
    text = (PACKAGING / "pooled-mlx.rb").read_text(encoding="utf-8")
    assert 'run [opt_bin/"pooled-mlx", "serve", "--service"]' in text
    assert "keep_alive successful_exit: false" in text
    assert "process_type :interactive" in text
    opened = len(re.findall(r"^\s*(?:class|def|service do|test do)\b", text, re.MULTILINE))
    assert len(re.findall(r"^\s*end$", text, re.MULTILINE)) == opened
