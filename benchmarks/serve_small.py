"""The embedded model, as `pooled-mlx serve` would run it."""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.models import small_card, small_folder
from benchmarks.serving import serve_room
from pooled_mlx.core.card import SamplingDefaults
from pooled_mlx.engine.room import Room, RoomSettings
from pooled_mlx.store.paths import cache_folder

if __name__ == "__main__":
    card = replace(small_card(), sampling=SamplingDefaults(temperature=0.0))
    steps = cache_folder() / "prefill-steps.json"
    step = int(sys.argv[1]) if len(sys.argv) > 1 else None
    serve_room(Room(card, small_folder(), RoomSettings(steps_file=steps, prefill_step=step)))
