"""Runs a step in microbatches: the function is rewritten, then traced again.

What comes out is an ordinary traced function with a loop, that planning and lowering treat like any other.
"""

from autopar.lower.microbatch.rewrite import microbatched

__all__ = ["microbatched"]
