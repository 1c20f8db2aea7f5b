"""The update of parameters as compilers fuse it: one kernel for each, which reads every value once.

What an elementwise operator of the update makes, or has read, of the size of its result, is there for the others of
that size: new moments are not read again for the new parameter. Adam in f32 so reads 16 bytes a parameter, and writes
12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.ir import Graph, Operator, TensorType
from autopar.ir.phases import phase_of
from autopar.search.intra.draft import ValueDraft


@dataclass
class UpdateStreams:
    """Values that kernels of the update have read and made so far.

    Args:
        there: keys of values.
    """

    there: set[str] = field(default_factory=set)

    def read(
        self, op: Operator, stored: Iterable[str], values: Mapping[str, ValueDraft], transient: bool
    ) -> list[TensorType]:
        """Types of the values in memory that a kernel of the update reads first, of those that it needs.

        Args:
            op: the operator that it ends in.
            stored: keys of the values in memory that its operands are computed from.
            values: all values.
            transient: the operator is part of the kernels that read it: these read for it.
        """
        size = max((v.type.size for v in op.results), default=0)
        types = [(key, values[key].type) for key in sorted(stored)]
        fresh = [(key, type) for key, type in types if type.size != size or key not in self.there]
        if not transient:
            self.there |= {key for key, type in fresh if type.size == size} | {v.name for v in op.results}
        return [type for _, type in fresh]


def has_backward(graph: Graph) -> bool:
    """Whether a graph computes gradients: then what is of no pass updates something with them."""
    return any(
        phase_of(op) == "backward" or any(has_backward(region) for _, region in op.regions) for op in graph.operators
    )
