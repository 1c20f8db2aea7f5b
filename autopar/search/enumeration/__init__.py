"""Enumerate: which numbers of stages and microbatches, and which slicings, are worth planning."""
