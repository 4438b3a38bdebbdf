"""Scripted answers: the tiny model, the scripts, the faults that they may ask for."""
