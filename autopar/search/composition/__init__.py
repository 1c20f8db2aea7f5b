"""Compose: planned stages as one pipeline, its schedule, its time and its record."""
