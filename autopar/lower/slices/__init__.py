"""Slices of tokens: graphs of slices with what running them needs, and a step that runs slice by slice."""

from autopar.lower.slices.bound import bound_slice
from autopar.lower.slices.rewrite import sliced_step

__all__ = ["bound_slice", "sliced_step"]
