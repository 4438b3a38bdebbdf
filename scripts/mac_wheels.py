"""What a Mac would install, checked without one: python -m scripts.mac_wheels [--newest]

For macOS 14, 15 and 26 and Python 3.11 to 3.14 on Apple silicon: every dependency has a wheel (rumps has a source archive),
their versions agree with each other, and every name that the package uses of mlx, mlx_lm, rumps, AppKit and Foundation is in
them. Prints the sizes. The versions are those of constraints.txt; with --newest the newest that pyproject.toml allows, which is
what a user gets. Lays the sources of rumps into build/mac/rumps, where the tests of the menu bar run them.

Exit code 1 when something is missing. Where the package index cannot be asked it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import functools
import io
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.library_names import Sources, framework_has, used_names
from scripts.package_index import Found, IndexUnavailable, PackageIndex

ROOT = Path(__file__).resolve().parents[1]
RUMPS = ROOT / "build" / "mac" / "rumps"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
SYSTEMS = (14, 15, 26)
FROM_SOURCE = ("rumps",)
MARK_BYTES = 314 * 10**6
"""What all of it took unpacked, without pyobjc, when this was written."""
LIBRARIES = ("mlx", "mlx_lm")
_WORKERS = 16
_ROUNDS = 20


@dataclass(frozen=True)
class Target:
    """One Mac: its macOS and its Python."""

    system: int
    python: tuple[int, int]

    @property
    def name(self) -> str:
        """For people."""
        return f"macOS {self.system}, Python {self.python[0]}.{self.python[1]}"

    @property
    def python_text(self) -> str:
        """`3.13.0`: the oldest of its kind."""
        return f"{self.python[0]}.{self.python[1]}.0"

    @functools.cached_property
    def tags(self) -> dict[Tag, int]:
        """Tags of wheels that can be installed there -> their rank, 0 for the best."""
        platforms = list(mac_platforms((self.system, 0), "arm64"))
        abi = f"cp{self.python[0]}{self.python[1]}"
        ordered = [
            *cpython_tags(self.python, abis=[abi], platforms=platforms),
            *compatible_tags(self.python, abi, platforms=platforms),
        ]
        return {tag: rank for rank, tag in enumerate(ordered)}

    def environment(self, extra: str = "") -> dict[str, str]:
        """What markers are asked about."""
        found: Environment = {
            "implementation_name": "cpython",
            "implementation_version": self.python_text,
            "os_name": "posix",
            "platform_machine": "arm64",
            "platform_release": "",
            "platform_system": "Darwin",
            "platform_version": "",
            "python_full_version": self.python_text,
            "platform_python_implementation": "CPython",
            "python_version": self.python_text.removesuffix(".0"),
            "sys_platform": "darwin",
        }
        return {**found, "extra": extra}  # pyright: ignore[reportReturnType]


class Unsolved(Exception):
    """No set of versions was found; the message says where it failed."""


class Solver:
    """Finds what pip would install. `pins`: versions that are taken, whatever the index has."""

    def __init__(self, index: PackageIndex, pins: dict[str, Version]) -> None:
        self._index, self._pins = index, pins
        self._source_needs: dict[str, list[Requirement]] = {}

    def solve(self, target: Target, wanted: list[Requirement]) -> dict[str, Found]:
        """Project -> file. The newest versions that what was seen allows, until nothing changes. Raises `Unsolved`."""
        chosen: dict[str, Found] = {}
        for _ in range(_ROUNDS):
            before = dict(chosen)
            limits = self._limits(target, wanted, chosen)
            with ThreadPoolExecutor(_WORKERS) as pool:
                found = pool.map(lambda entry: self._best(target, *entry), limits.items())
                chosen = dict(zip(limits, found, strict=True))
                list(pool.map(self._needs, chosen.values()))
            if chosen == before:
                return chosen
        raise Unsolved(f"{target.name}: the versions do not settle")

    def _limits(
        self, target: Target, wanted: list[Requirement], chosen: dict[str, Found]
    ) -> dict[str, dict[str, SpecifierSet]]:
        """Project -> who needs it -> which versions, from `wanted` through everything that is chosen."""
        limits: dict[str, dict[str, SpecifierSet]] = {}
        waiting = [("pooled-mlx", requirement) for requirement in wanted]
        seen: set[tuple[str, str]] = set()
        while waiting:
            by, requirement = waiting.pop()
            name = canonicalize_name(requirement.name)
            limits.setdefault(name, {})[by] = requirement.specifier & limits.get(name, {}).get(by, SpecifierSet())
            file = chosen.get(name)
            for extra in ("", *requirement.extras):
                if file is None or (name, extra) in seen:
                    continue
                seen.add((name, extra))
                waiting += [(name, need) for need in self._needs(file) if _applies(need, target.environment(extra))]
        return limits

    def _needs(self, file: Found) -> list[Requirement]:
        return file.requirements if file.tags else self._source_needs[file.filename]

    def _best(self, target: Target, name: str, limits: dict[str, SpecifierSet]) -> Found:
        files = self._index.files(name)
        pin = self._pins.get(name)
        versions = sorted({file.version for file in files}, reverse=True) if pin is None else [pin]
        for version in versions:
            against = [
                f"{by} needs {limit}" for by, limit in limits.items() if not limit.contains(version, prereleases=bool(pin))
            ]
            if against:
                if pin is not None:
                    raise Unsolved(f"{target.name}: {name} {pin} is locked, but {', '.join(against)}")
                continue
            fitting = [file for file in files if file.version == version and file.python.contains(target.python_text)]
            usable = [file for file in fitting if file.tags & target.tags.keys()]
            if usable:
                return min(usable, key=lambda file: min(target.tags[tag] for tag in file.tags & target.tags.keys()))
            source = next((file for file in fitting if not file.tags), None)
            if source is not None and name in FROM_SOURCE:
                self._source_needs[source.filename] = lay_down(self._index.read(source.url))
                return source
            if pin is not None:
                raise Unsolved(f"{target.name}: {name} {pin} has no wheel")
        raise Unsolved(f"{target.name}: {name} has no wheel that fits ({'; '.join(f'{by} {at}' for by, at in limits.items())})")


def _applies(need: Requirement, environment: dict[str, str]) -> bool:
    return need.marker is None or need.marker.evaluate(environment)


@functools.cache
def lay_down(archive: bytes) -> list[Requirement]:
    """Unpack rumps' source archive for the tests; what it needs."""
    shutil.rmtree(RUMPS, ignore_errors=True)
    RUMPS.mkdir(parents=True)
    needs: list[Requirement] = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            inside = member.name.partition("/")[2]
            if not member.isfile() or ".." in inside:
                continue
            file = tar.extractfile(member)
            assert file is not None
            if inside.startswith("rumps/"):
                path = RUMPS / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
            elif inside.endswith(".egg-info/requires.txt"):
                lines = file.read().decode("utf-8").partition("[")[0].splitlines()
                needs = [Requirement(line) for line in lines if line.strip()]
    return needs


def missing_names(index: PackageIndex, chosen: dict[str, Found]) -> Iterator[str]:
    """One line for each name that the package uses and these versions lack."""
    mlx = Sources.of_wheel(chosen["mlx"].archive, "mlx", re.compile(r"\.pyi?$"))
    mlx_lm = _whole(index, chosen["mlx-lm"])
    rumps = Sources({str(path.relative_to(RUMPS)): path.read_text(encoding="utf-8") for path in RUMPS.rglob("*.py")})
    cocoa = chosen["pyobjc-framework-cocoa"].archive
    metadata = {name: cocoa.read(f"{name}/_metadata.py").decode("utf-8") for name in ("AppKit", "Foundation")}
    has: dict[str, Callable[[str], bool]] = {
        "mlx": mlx.has,
        "mlx_lm": Sources.of_wheel(mlx_lm, "mlx_lm", re.compile(r"\.py$")).has,
        "rumps": rumps.has,
        # AppKit hands on all that Foundation has.
        "AppKit": lambda name: framework_has(metadata["AppKit"] + metadata["Foundation"], name),
        "Foundation": lambda name: framework_has(metadata["Foundation"], name),
    }
    used = used_names(ROOT / "pooled_mlx", LIBRARIES)
    for name, place in sorted(used.items()):
        library = name.partition(".")[0]
        if not has[library](name):
            yield f"{name} ({place}) is not in {library} of these versions"


def _whole(index: PackageIndex, file: Found) -> zipfile.ZipFile:
    """A small wheel of many files, fetched in one piece."""
    return zipfile.ZipFile(io.BytesIO(index.read(file.url)))


def requirements() -> list[Requirement]:
    """What `pooled-mlx[menubar]` needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["menubar"])]


def locked() -> dict[str, Version]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true", help="the newest versions that pyproject.toml allows")
    args = parser.parse_args(arguments)
    try:
        problems = check(PackageIndex(), {} if args.newest else locked())
    except IndexUnavailable as error:
        print(f"mac_wheels: skipped, the package index cannot be asked: {error}")
        return 0
    for problem in problems:
        print(f"mac_wheels: {problem}", file=sys.stderr)
    return int(bool(problems))


def check(index: PackageIndex, pins: dict[str, Version]) -> list[str]:
    """Print the sizes for every Mac; what is missing. Raises `IndexUnavailable`."""
    solver = Solver(index, pins)
    problems: list[str] = []
    chosen: dict[str, Found] = {}
    print(f"{'':<22}{'files':>6}{'download':>11}{'unpacked':>11}{'with pyobjc':>13}")
    for target in (Target(system, python) for python in PYTHONS for system in SYSTEMS):
        try:
            wanted = [need for need in requirements() if _applies(need, target.environment("menubar"))]
            chosen = solver.solve(target, wanted)
        except Unsolved as error:
            problems.append(str(error))
            continue
        rows = [file for name, file in chosen.items() if not name.startswith(("pyobjc", "rumps"))]
        more = [file for name, file in chosen.items() if name.startswith("pyobjc")]
        download, unpacked = (sum(file.size or 0 for file in rows), sum(file.unpacked_bytes for file in rows))
        whole = unpacked + sum(file.unpacked_bytes for file in more)
        print(f"{target.name:<22}{len(chosen):>6}{_mb(download):>11}{_mb(unpacked):>11}{_mb(whole):>13}")
    if chosen:
        problems += missing_names(index, chosen)
        print(f"the mark is {_mb(MARK_BYTES)} unpacked on macOS 14, without pyobjc")
    return problems


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
