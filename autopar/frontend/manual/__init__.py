"""Regions of a step that run on a mesh of the user's own: `jax.shard_map`, and `jax.pmap`, which is made of it."""

from autopar.frontend.manual.copies import with_copies
from autopar.frontend.manual.region import is_manual, region

__all__ = ["is_manual", "region", "with_copies"]
