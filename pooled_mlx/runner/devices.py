"""What this machine offers: Metal's facts from MLX, the memory from the system."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Protocol

from pooled_mlx.core.memory import DeviceFacts

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

DEVICE_ERRORS = (
    "command buffer",
    "kiogpu",
    "[metal",
    "insufficient memory",
    "out of memory",
    "[malloc",
    "unable to allocate",
)
"""What the messages of errors hold that are the device's own, in lower case: Metal's, and those of MLX's allocators."""


class DeviceReader(Protocol):
    """Reads the facts of a machine; tests hand in recorded ones."""

    def __call__(self) -> DeviceFacts:
        """The facts."""
        ...


def read_device() -> DeviceFacts:
    """The facts of this machine. Loads MLX on a Mac only."""
    memory = memory_bytes()
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return DeviceFacts(platform.processor() or platform.machine(), memory)
    import mlx.core as mx

    if not mx.metal.is_available():
        return DeviceFacts(platform.machine(), memory)
    info = mx.device_info()
    return DeviceFacts(
        name=str(info.get("device_name", "Apple Silicon")),
        memory_bytes=int(info.get("memory_size", memory)),
        has_metal=True,
        recommended_bytes=int(info["max_recommended_working_set_size"]),
        largest_buffer_bytes=int(info["max_buffer_length"]),
    )


def process_bytes() -> int:
    """Memory of this process that is resident, in bytes: what the system counts, not only MLX."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def memory_bytes() -> int:
    """The memory of this machine, or of the container that this process runs in."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and 0 < int(text) < total:
            return int(text)
    return total
