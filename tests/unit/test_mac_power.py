"""The power assertion and the memory pressure, with stand-ins for what only a Mac has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pooled_mlx.mac.power import Caffeinate, PowerGuard, power_guard
from pooled_mlx.mac.pressure import (
    RECOVERY_SECONDS,
    Pressure,
    PressureWatch,
    level_from,
    read_linux_pressure,
    read_mac_pressure,
    system_pressure,
)
from tests.mac_fakes import FakeClock


class FakeAssertion:
    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def hold(self) -> None:
        if self.fails:
            raise FileNotFoundError("/usr/bin/caffeinate")
        self.calls.append("hold")

    def release(self) -> None:
        self.calls.append("release")


def test_the_assertion_is_held_only_while_requests_run() -> None:
    assertion = FakeAssertion()
    guard = PowerGuard(assertion)
    for running in (0, 1, 2, 1, 0, 0, 3):
        guard.update(running)
    assert assertion.calls == ["hold", "release", "hold"]
    assert guard.held
    guard.close()
    assert assertion.calls[-1] == "release"
    assert not guard.held


def test_a_system_that_cannot_is_reported_once() -> None:
    warnings: list[str] = []
    guard = PowerGuard(FakeAssertion(fails=True), warnings.append)
    for running in (1, 0, 1):
        guard.update(running)
    assert not guard.held
    assert warnings == ["this Mac cannot be kept awake while it works: /usr/bin/caffeinate"]


def test_many_threads_hold_it_once() -> None:
    assertion = FakeAssertion()
    guard = PowerGuard(assertion)
    threads = [threading.Thread(target=guard.update, args=(1,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert assertion.calls == ["hold"]


class FakeProcess:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def terminate(self) -> None:
        self.calls.append("terminate")

    def wait(self) -> None:
        self.calls.append("wait")


def test_caffeinate_lets_the_display_sleep_and_dies_with_us() -> None:
    commands: list[Sequence[str]] = []
    process = FakeProcess()

    def spawn(command: Sequence[str]) -> FakeProcess:
        commands.append(command)
        return process

    assertion = Caffeinate(spawn, pid=77)
    assertion.release()
    assertion.hold()
    assertion.hold()
    assertion.release()
    assertion.release()
    assert commands == [["/usr/bin/caffeinate", "-i", "-w", "77"]]
    assert process.calls == ["terminate", "wait"]


@pytest.mark.parametrize(
    ("enabled", "platform", "works"), [(True, "darwin", True), (False, "darwin", False), (True, "linux", False)]
)
def test_the_off_switch_and_other_systems(enabled: bool, platform: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[Sequence[str]] = []

    def spawn(command: Sequence[str]) -> FakeProcess:
        spawned.append(command)
        return FakeProcess()

    monkeypatch.setattr("pooled_mlx.mac.power._spawn", spawn)
    guard = power_guard(enabled, platform=platform)
    guard.update(1)
    assert guard.held is works
    assert len(spawned) == int(works)
    guard.close()


class Stage:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.level = Pressure.NORMAL
        self.shares: list[float] = []
        self.warnings: list[str] = []
        self.watch = PressureWatch(
            lambda: self.level, lambda share, _: self.shares.append(share), warn=self.warnings.append, clock=self.clock
        )

    def look(self, level: Pressure, after_seconds: float = 0.0) -> None:
        self.clock.sleep(after_seconds)
        self.level = level
        assert self.watch.look()


def test_the_pool_shrinks_at_once() -> None:
    stage = Stage()
    for level in (Pressure.NORMAL, Pressure.WARNING, Pressure.WARNING, Pressure.CRITICAL):
        stage.look(level)
    assert stage.shares == [0.5, 0.0]


def test_the_pool_grows_back_only_after_a_calm_minute() -> None:
    stage = Stage()
    stage.look(Pressure.CRITICAL)
    stage.look(Pressure.NORMAL, after_seconds=1)
    stage.look(Pressure.NORMAL, after_seconds=RECOVERY_SECONDS - 1)
    assert stage.shares == [0.0]
    stage.look(Pressure.CRITICAL, after_seconds=1)
    stage.look(Pressure.NORMAL, after_seconds=1)
    stage.look(Pressure.NORMAL, after_seconds=RECOVERY_SECONDS - 1)
    assert stage.shares == [0.0]
    stage.look(Pressure.NORMAL, after_seconds=1)
    assert stage.shares == [0.0, 1.0]


def test_it_grows_step_by_step_when_the_pressure_only_eases() -> None:
    stage = Stage()
    stage.look(Pressure.CRITICAL)
    stage.look(Pressure.WARNING)
    stage.look(Pressure.WARNING, after_seconds=RECOVERY_SECONDS)
    stage.look(Pressure.NORMAL)
    stage.look(Pressure.NORMAL, after_seconds=RECOVERY_SECONDS)
    assert stage.shares == [0.0, 0.5, 1.0]


def test_a_system_that_does_not_tell_ends_the_watch_with_one_warning() -> None:
    stage = Stage()

    def read() -> Pressure:
        raise FileNotFoundError("/proc/pressure/memory")

    watch = PressureWatch(read, lambda *_: None, warn=stage.warnings.append)
    watch.start(interval_seconds=0.001)
    watch.close()
    assert stage.warnings == ["memory pressure cannot be watched: /proc/pressure/memory"]


def test_its_own_thread_looks_until_close() -> None:
    looked = threading.Event()

    def read() -> Pressure:
        looked.set()
        return Pressure.NORMAL

    watch = PressureWatch(read, lambda *_: None)
    watch.start(interval_seconds=0.001)
    assert looked.wait(timeout=30)
    watch.close()
    assert not any(thread.name == "memory-pressure" for thread in threading.enumerate())


@pytest.mark.parametrize(("number", "level"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (9, 4)])
def test_levels_of_the_sysctl(number: int, level: int) -> None:
    assert level_from(number) == level


@pytest.mark.parametrize(
    ("share", "level"), [("0.00", Pressure.NORMAL), ("5.00", Pressure.WARNING), ("41.10", Pressure.CRITICAL)]
)
def test_linux_stall_information(tmp_path: Path, share: str, level: Pressure) -> None:
    path = tmp_path / "memory"
    path.write_text(f"some avg10=90.00 avg60=0 avg300=0 total=1\nfull avg10={share} avg60=0.00 avg300=0.00 total=8\n")
    assert read_linux_pressure(path) == level


def test_linux_without_the_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    with pytest.raises(OSError, match="has no line 'full'"):
        read_linux_pressure(path)


def test_the_mac_reader_asks_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    class Library:
        result = 0

        def sysctlbyname(self, name: bytes, value: object, *_: object) -> int:
            import ctypes

            asked.append(name)
            ctypes.cast(value, ctypes.POINTER(ctypes.c_int)).contents.value = 2  # pyright: ignore[reportArgumentType]
            return self.result

    library = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: library)
    assert read_mac_pressure() is Pressure.WARNING
    assert asked == [b"kern.memorystatus_vm_pressure_level"]
    library.result = -1
    with pytest.raises(OSError, match="cannot be read"):
        read_mac_pressure()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    with pytest.raises(OSError, match="no sysctlbyname"):
        read_mac_pressure()


def test_the_reader_of_each_system() -> None:
    assert system_pressure("darwin") is read_mac_pressure
    assert system_pressure("linux") is read_linux_pressure
