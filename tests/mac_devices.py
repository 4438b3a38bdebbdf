"""Facts of Macs as their systems report them (Metal lets one process use 2/3 of up to 32 GB, 3/4 of more)."""

from __future__ import annotations

from pooled_mlx.core.memory import GIB, DeviceFacts


def _mac(chip: str, gigabytes: int, recommended: int) -> DeviceFacts:
    return DeviceFacts(f"Apple {chip}, {gigabytes} GB", gigabytes * GIB, True, recommended, recommended * 3 // 4)


MACS = (
    _mac("M1", 8, 5_726_633_984),
    _mac("M1", 16, 11_453_251_584),
    _mac("M2", 24, 17_179_869_184),
    _mac("M2 Pro", 32, 22_906_503_168),
    _mac("M3 Max", 36, 28_991_029_248),
    _mac("M4 Pro", 48, 38_654_705_664),
    _mac("M1 Max", 64, 51_539_607_552),
    _mac("M3 Max", 96, 77_309_411_328),
    _mac("M5 Max", 128, 115_448_725_504),
)
