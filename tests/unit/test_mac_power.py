"""The power assertion and the memory pressure, with stand-ins for what only a Mac has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pooled_mlx.mac.power import Caffeinate, PowerGuard, power_guard
from pooled_mlx.mac.pressure import (
    STEP_SECONDS,
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
        self.used = 1.0
        self.holds: list[tuple[float, bool]] = []
        self.warnings: list[str] = []
        self.watch = PressureWatch(
            lambda: self.level,
            lambda hold, _: self.holds.append((hold.share, hold.keeps_pins)),
            used=lambda: self.used,
            warn=self.warnings.append,
            clock=self.clock,
        )

    def look(self, level: Pressure, after_seconds: float = 0.0) -> None:
        self.clock.sleep(after_seconds)
        self.level = level
        assert self.watch.look()

    def look_for(self, level: Pressure, seconds: int) -> None:
        """Once a second."""
        for _ in range(seconds):
            self.look(level, after_seconds=1)


def test_a_warning_trims_what_is_in_use_until_the_system_is_content() -> None:
    stage = Stage()
    stage.used = 0.75
    stage.look(Pressure.NORMAL)
    stage.look(Pressure.WARNING)
    assert stage.holds == [(0.625, True)], "at once"
    stage.used = 0.625
    stage.look_for(Pressure.WARNING, 9)
    assert len(stage.holds) == 1, "the system takes a moment"
    stage.look(Pressure.WARNING, after_seconds=1)
    assert stage.holds[1:] == [(0.5, True)]
    stage.look_for(Pressure.NORMAL, 19)
    assert len(stage.holds) == 2


def test_a_warning_that_stays_leaves_a_quarter_and_the_pins() -> None:
    stage = Stage()
    stage.look_for(Pressure.WARNING, 600)
    assert stage.holds[0] == (0.875, True)
    assert stage.holds[-1] == (0.25, True)
    assert len(stage.holds) == 6
    assert [before > after for before, after in pairwise(stage.holds)] == [True] * 5


def test_critical_pressure_takes_all_at_once_and_the_pins_if_it_stays() -> None:
    stage = Stage()
    stage.look(Pressure.WARNING)
    stage.look(Pressure.CRITICAL, after_seconds=1)
    assert stage.holds[1:] == [(0.0, True)]
    stage.look_for(Pressure.CRITICAL, 9)
    assert len(stage.holds) == 2
    stage.look_for(Pressure.CRITICAL, 60)
    assert stage.holds[2:] == [(0.0, False)]


def test_the_pool_grows_back_in_steps_while_the_system_is_calm() -> None:
    stage = Stage()
    stage.look(Pressure.CRITICAL)
    stage.look_for(Pressure.NORMAL, int(STEP_SECONDS))
    assert stage.holds == [(0.0, True)], "a calm that has just begun"
    stage.look(Pressure.NORMAL, after_seconds=1)
    assert stage.holds[1:] == [(0.25, True)]
    stage.look_for(Pressure.NORMAL, 19)
    assert len(stage.holds) == 2
    stage.look_for(Pressure.NORMAL, 300)
    assert stage.holds[2:] == [(0.5, True), (1.0, True)]


def test_what_grows_back_is_taken_again_at_once() -> None:
    stage = Stage()
    stage.look(Pressure.CRITICAL)
    stage.look_for(Pressure.NORMAL, 45)
    assert stage.holds[-1] == (0.5, True)
    stage.used = 0.4
    stage.look_for(Pressure.WARNING, 11)
    assert stage.holds[-1] == (0.275, True)
    stage.look(Pressure.CRITICAL)
    assert stage.holds[-1] == (0.0, True)


def test_pressure_that_only_eases_gives_back_a_quarter() -> None:
    stage = Stage()
    stage.look_for(Pressure.CRITICAL, 30)
    stage.look_for(Pressure.WARNING, 120)
    assert stage.holds == [(0.0, True), (0.0, False), (0.25, True)]


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
