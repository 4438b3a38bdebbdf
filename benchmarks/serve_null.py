"""The embedded model's tokenizer around a model that computes nothing."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.models import null_model, small_card, small_folder
from benchmarks.serving import serve_room
from pooled_mlx.core.card import SamplingDefaults
from pooled_mlx.engine.room import Room, RoomSettings

if __name__ == "__main__":
    card = replace(small_card(), sampling=SamplingDefaults(temperature=0.0))
    serve_room(Room(card, small_folder(), RoomSettings(prefill_step=512), load_model=lambda folder: null_model(49152)))
