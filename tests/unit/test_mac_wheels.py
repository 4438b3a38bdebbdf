"""What a Mac would install, against a small index on this machine; and the names that the package uses of other libraries."""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import mac_wheels, package_index
from scripts.library_names import Sources, framework_has, used_names
from scripts.mac_wheels import Solver, Target, Unsolved
from scripts.package_index import IndexUnavailable, PackageIndex

ROOT = Path(__file__).parents[2]
MAC = Target(15, (3, 13))


class Shelf:
    """A package index: pages as JSON, files by range."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.pages: dict[str, list[dict[str, Any]]] = {}
        self.ranges = True
        self.asked: list[str] = []

    def wheel(self, name: str, version: str, tag: str = "py3-none-any", needs: tuple[str, ...] = (), **more: Any) -> None:
        data = io.BytesIO()
        project = name.replace("-", "_")
        with zipfile.ZipFile(data, "w") as archive:
            lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {need}" for need in needs)]
            archive.writestr(f"{project}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
            for path, text in more.pop("sources", {}).items():
                archive.writestr(path, text)
            archive.writestr("weights.bin", bytes(more.pop("size", 10)))
        self.put(name, f"{project}-{version}-{tag}.whl", data.getvalue(), **more)

    def source(self, name: str, version: str, files: dict[str, str]) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as tar:
            for path, text in files.items():
                entry = tarfile.TarInfo(f"{name}-{version}/{path}")
                entry.size = len(text.encode())
                tar.addfile(entry, io.BytesIO(text.encode()))
        self.put(name, f"{name}-{version}.tar.gz", data.getvalue())

    def put(self, name: str, filename: str, data: bytes, **more: Any) -> None:
        self.files[filename] = data
        entry = {"filename": filename, "url": f"../../files/{filename}", "size": len(data), **more}
        self.pages.setdefault(name, []).append(entry)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    shelf = Shelf()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            shelf.asked.append(self.path)
            name = self.path.rstrip("/").rpartition("/")[2]
            kind, status = "application/octet-stream", 200
            if self.path.startswith("/simple/") and name in shelf.pages:
                data, kind = json.dumps({"files": shelf.pages[name]}).encode(), "application/vnd.pypi.simple.v1+json"
            elif name in shelf.files:
                data = shelf.files[name]
                if (wanted := self.headers.get("Range")) and shelf.ranges:
                    first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                    data, status = data[first : last + 1], 206
            else:
                data, status = b"", 404
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    monkeypatch.setattr(package_index, "pip_settings", lambda: {"index-url": url})
    yield shelf
    server.shutdown()
    server.server_close()


def solve(target: Target, *wanted: str, pins: dict[str, Version] | None = None) -> dict[str, str]:
    chosen = Solver(PackageIndex(), pins or {}).solve(target, [Requirement(text) for text in wanted])
    return {name: file.filename for name, file in chosen.items()}


def test_markers_are_those_of_the_mac_and_wheels_those_of_its_system(shelf: Shelf) -> None:
    shelf.wheel("a", "1.0", needs=('b>=2; sys_platform == "darwin"', 'c; sys_platform == "linux"', 'd; extra == "more"'))
    for system in (14, 26):
        shelf.wheel("b", "2.0", f"cp313-cp313-macosx_{system}_0_arm64")
    shelf.wheel("b", "2.0", "cp313-cp313-manylinux_2_28_x86_64")
    shelf.wheel("d", "1.0", "cp39-abi3-macosx_11_0_arm64")
    assert solve(MAC, "a") == {"a": "a-1.0-py3-none-any.whl", "b": "b-2.0-cp313-cp313-macosx_14_0_arm64.whl"}
    assert solve(Target(26, (3, 13)), "a[more]") == {
        "a": "a-1.0-py3-none-any.whl",
        "b": "b-2.0-cp313-cp313-macosx_26_0_arm64.whl",
        "d": "d-1.0-cp39-abi3-macosx_11_0_arm64.whl",
    }


def test_the_newest_that_everybody_allows_and_this_python_can_have(shelf: Shelf) -> None:
    shelf.wheel("a", "1.0", needs=("b", "c<3"))
    shelf.wheel("b", "1.0", needs=("c<2",))
    for version in ("1.0", "1.5", "2.0"):
        shelf.wheel("c", version)
    shelf.wheel("c", "1.9", **{"requires-python": ">=3.14"})
    shelf.wheel("c", "1.8", yanked=True)
    shelf.wheel("c", "1.7rc1")
    assert solve(MAC, "a")["c"] == "c-1.5-py3-none-any.whl"
    assert solve(Target(15, (3, 14)), "a")["c"] == "c-1.9-py3-none-any.whl"
    assert solve(MAC, "a", pins={"c": Version("1.0")})["c"] == "c-1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({}, r"macOS 15, Python 3\.13: b has no wheel that fits \(a >=1\)"),
        ({"b": Version("1.0")}, r"macOS 15, Python 3\.13: b 1\.0 has no wheel"),
        ({"b": Version("0.9")}, r"b 0\.9 is locked, but a needs >=1"),
    ],
)
def test_what_a_mac_could_not_install_is_named(shelf: Shelf, pins: dict[str, Version], words: str) -> None:
    shelf.wheel("a", "1.0", needs=("b>=1",))
    shelf.wheel("b", "1.0", "cp313-cp313-manylinux_2_28_x86_64")
    shelf.source("b", "1.0", {"setup.py": ""})
    with pytest.raises(Unsolved, match=words):
        solve(MAC, "a", pins=pins)


def test_a_project_that_the_index_lacks_is_named(shelf: Shelf) -> None:
    with pytest.raises(Unsolved, match=r"nothing has no wheel that fits \(pooled-mlx \)"):
        solve(MAC, "nothing")


def test_a_large_wheel_is_read_in_parts(shelf: Shelf) -> None:
    shelf.wheel("a", "1.0", size=3_000_000)
    (file,) = PackageIndex().files("a")
    assert file.requirements == []
    assert file.unpacked_bytes > 3_000_000
    assert file.archive.read("weights.bin") == bytes(3_000_000)


def test_an_index_without_parts_or_json_is_unavailable(shelf: Shelf) -> None:
    shelf.wheel("a", "1.0", size=300_000)
    shelf.ranges = False
    with pytest.raises(IndexUnavailable, match="does not serve parts"):
        _ = PackageIndex().files("a")[0].requirements
    with pytest.raises(IndexUnavailable, match="not told everything within 0 s"):
        PackageIndex(seconds=0).files("a")
    shelf.files["page"] = b"<html>"
    with pytest.raises(IndexUnavailable, match="it answers application/octet-stream and not"):
        PackageIndex().files("page")


@pytest.fixture
def whole(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An index with all that a small project of the same kind needs."""
    package = tmp_path / "pooled_mlx"
    package.mkdir()
    (package / "backend.py").write_text("import mlx.core as mx\nfrom mlx_lm.models import cache\n")
    (package / "engine.py").write_text("from pooled_mlx.backend import cache, mx\nmx.fast.rms_norm\ncache.KVCache()\n")
    (package / "shell.py").write_text(
        "def show(rumps, appkit):\n    rumps.App(appkit.NSApplicationActivationPolicyAccessory)\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["mlx>=1; sys_platform == \'darwin\'", "mlx-lm"]\n'
        "[project.optional-dependencies]\nmenubar = [\"rumps; sys_platform == 'darwin'\"]\n"
    )
    (tmp_path / "constraints.txt").write_text("# lock\nmlx==1.0\nmlx-lm==2.0\nrumps==0.4.0\npyobjc_framework.Cocoa==13.0\n")
    monkeypatch.setattr(mac_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(mac_wheels, "RUMPS", tmp_path / "build" / "rumps")
    mac_wheels.lay_down.cache_clear()
    core = {"mlx/core/__init__.pyi": "class array: ...", "mlx/core/fast.pyi": "def rms_norm(): ..."}
    for version in (11, 12, 13, 14):
        for system in (14, 15, 26):
            shelf.wheel("mlx", "1.0", f"cp3{version}-cp3{version}-macosx_{system}_0_arm64", sources=core, size=1_000_000)
    models = {"mlx_lm/models/__init__.py": "", "mlx_lm/models/cache.py": "class KVCache: ..."}
    shelf.wheel("mlx-lm", "2.0", needs=("mlx",), sources=models)
    shelf.source(
        "rumps",
        "0.4.0",
        {
            "rumps/__init__.py": "from .rumps import App",
            "rumps/rumps.py": "class App: ...",
            "rumps.egg-info/requires.txt": "pyobjc-framework-Cocoa\n\n[dev]\npytest\n",
            "../outside.py": "",
        },
    )
    metadata = {
        "AppKit/_metadata.py": 'enums = """$NSApplicationActivationPolicyAccessory@1$NSOther@2$"""',
        "Foundation/_metadata.py": "",
    }
    shelf.wheel("pyobjc-framework-cocoa", "13.0", "cp313-cp313-macosx_10_13_universal2", sources=metadata)
    for version in (11, 12, 14):
        tag = f"cp3{version}-cp3{version}-macosx_10_13_universal2"
        shelf.wheel("pyobjc-framework-cocoa", "13.0", tag, sources=metadata)
    return shelf


def test_the_whole_check(whole: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mac_wheels.main([]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = said.out.splitlines()[1:-1]
    assert [row.split("  ")[0] for row in rows] == [
        f"macOS {system}, Python 3.{python}" for python in (11, 12, 13, 14) for system in (14, 15, 26)
    ]
    assert all(row.split()[4] == "4" for row in rows)
    assert (tmp_path / "build" / "rumps" / "rumps" / "rumps.py").read_text() == "class App: ..."
    assert not list(tmp_path.rglob("outside.py"))


def test_a_name_that_is_gone_and_a_wheel_that_lacks_are_errors(
    whole: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "pooled_mlx" / "engine.py"
    engine.write_text(engine.read_text() + "mx.metal.start_capture()\ncache.OldCache\n")
    whole.pages["mlx"] = [entry for entry in whole.pages["mlx"] if "cp314" not in entry["filename"]]
    assert mac_wheels.main(["--newest"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        *(f"mac_wheels: macOS {system}, Python 3.14: mlx has no wheel that fits (pooled-mlx >=1)" for system in (14, 15, 26)),
        "mac_wheels: mlx.core.metal.start_capture (pooled_mlx/engine.py:4) is not in mlx of these versions",
        "mac_wheels: mlx_lm.models.cache.OldCache (pooled_mlx/engine.py:5) is not in mlx_lm of these versions",
    ]


def test_without_an_index_it_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    assert mac_wheels.main([]) == 0
    assert "mac_wheels: skipped, the package index cannot be asked: " in capsys.readouterr().out


def test_names_are_followed_through_modules_and_parameters(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("import mlx.core as mx\nimport os\n")
    (package / "a.py").write_text("def f():\n    from p.deep import mx as m\n    return m.linalg.norm(m.array(os.x))\n")
    (package / "b.py").write_text(
        "from mlx.utils import tree_flatten as flat\nimport mlx.nn\n"
        "class S:\n    def go(self, rumps):\n        rumps.App(); self._appkit.NSMenu.alloc(); mlx.nn.Linear\n"
        "        getattr(mx, 'new', None)\n"
    )
    used = used_names(package, ("mlx",))
    assert used["mlx.core.linalg.norm"] == "p/a.py:3"
    assert set(used) == {
        *("mlx.core", "mlx.core.linalg.norm", "mlx.core.array", "mlx.utils.tree_flatten", "mlx.nn.Linear", "mlx"),
        *("rumps.App", "AppKit.NSMenu.alloc"),
    }


def test_a_library_has_what_its_modules_bind() -> None:
    sources = Sources(
        {
            "l/__init__.py": "from .core import a as b\nif True:\n    C: int = 1\ntry:\n    import d\nexcept E:\n    d = 0\n",
            "l/core.pyi": "class K:\n    x: int\ndef f(): ...\n",
            "l/core.py": "class Wrong: ...",
            "l/space/m.py": "y = 1",
        }
    )
    for name in ("l", "l.b", "l.C", "l.d", "l.core.K", "l.core.K.x", "l.core.f", "l.space.m.y", "l.space"):
        assert sources.has(name), name
    for name in ("l.a", "l.core.Wrong", "l.core.x", "l.space.z", "other"):
        assert not sources.has(name), name


def test_a_framework_has_its_constants_classes_and_blocks() -> None:
    metadata = '$NSOne@1$NSTwo$NSName@d$"""\n r(b"NSTimer", b"timerWith:repeats:block:", {})\n "NSKey": 1'
    metadata = metadata.replace('b"NSTimer"', 'b"NSTimer"')
    for name in ("F.NSOne", "F.NSTwo", "F.NSName", "F.NSTimer.timerWith_repeats_block_", "F.NSTimer.invalidate", "F.NSKey"):
        assert framework_has(metadata, name), name
    for name in ("F.NSOn", "F.NSThree", "F.NSTimer.other_block_"):
        assert not framework_has(metadata, name), name


def test_the_modules_that_only_a_mac_has_are_seen_in_the_package() -> None:
    used = used_names(ROOT / "pooled_mlx", ("mlx", "mlx_lm"))
    assert {"rumps.App", "rumps.MenuItem", "rumps.separator", "AppKit.NSApplicationActivationPolicyAccessory"} <= set(used)
    assert {"mlx.core.array", "mlx_lm.models.cache.KVCache", "Foundation.NSRunLoopCommonModes"} <= set(used)
    assert all(re.fullmatch(r"pooled_mlx/\S+\.py:\d+", place) for place in used.values())
