"""Bounds that hold for every plan of a step: values in memory, and the share of stages and microbatches in its work."""
