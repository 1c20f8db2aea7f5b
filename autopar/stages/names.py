"""Names of what the graph of a stage takes and gives besides inputs and outputs of the step: a prefix and a value."""

from __future__ import annotations

#: A microbatch's piece of an input of the step; what another stage sends with every microbatch, and after the last
#: one; what the stage sends with every microbatch.
PIECE, FROM, LATE, SEND = "piece/", "from/", "late/", "send/"


def is_of_microbatch(name: str) -> bool:
    """Whether an input of a stage's graph comes with every microbatch."""
    return name.startswith((PIECE, FROM))
