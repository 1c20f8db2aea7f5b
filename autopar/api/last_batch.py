"""A batch that the number of microbatches does not divide, as the last one of a data set often is."""

from __future__ import annotations


def counts_for(size: int, asked: int) -> list[int]:
    """Numbers of equal microbatches of a batch of ``size``: the highest up to ``asked``, then those above, rising."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    first = max(n for n in divisors if n <= asked)
    return [n for n in divisors if n >= first]


def uneven_batch(name: str, size: int, asked: int, count: int) -> str:
    """What is said of a call of the step ``name``, once, where ``count`` microbatches are taken, not ``asked``."""
    return (
        f"{name}: {asked} microbatches do not divide a batch of {size}; such a call runs in {count} "
        "(this is said once; drop the last batch of a data set or pad it to keep one program)"
    )
