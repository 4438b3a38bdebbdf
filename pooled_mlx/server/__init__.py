"""HTTP: the only package that imports Quart and Hypercorn."""
