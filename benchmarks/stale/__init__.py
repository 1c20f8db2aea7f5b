"""How well training learns when updates do not wait for each other: ``python -m benchmarks stale``."""
