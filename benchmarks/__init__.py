"""Measurements as ratios, each against its reference in the same run: `python -m benchmarks [NAME ...]`."""
