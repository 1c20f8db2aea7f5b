"""A batch that the number of microbatches does not divide, as the last one of a data set often is."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from autopar.ir import Graph
from autopar.microbatch import batch_size

logger = logging.getLogger("autopar")


@dataclass
class LastBatch:
    """Numbers of microbatches for batches of other sizes than the first.

    Args:
        warned: whether it was said that a number was not possible.
    """

    warned: bool = False

    def counts(self, graph: Graph, asked: int, *, first: bool) -> list[int]:
        """Numbers of microbatches to try for a batch, the preferred one first.

        Args:
            graph: graph of the step, whose batch size counts.
            asked: the number that the user asked for.
            first: whether this is the first batch; then the number is ``asked`` and must divide it.
        """
        size = batch_size(graph)
        if first or size is None or size % asked == 0:
            return [asked]
        counts = counts_for(size, asked)
        if not self.warned:
            self.warned = True
            logger.warning(
                "%s: %d microbatches do not divide a batch of %d; such a call runs in %d (this is said once; drop the "
                "last batch of a data set or pad it to keep one program)",
                graph.name, asked, size, counts[0],
            )  # fmt: skip
        return counts


def counts_for(size: int, asked: int) -> list[int]:
    """Numbers of equal microbatches of a batch of ``size``: the highest up to ``asked``, then those above, rising."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    first = max(n for n in divisors if n <= asked)
    return [n for n in divisors if n >= first]
