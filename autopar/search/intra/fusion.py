"""Finds operators that a compiler fuses into their neighbours, so that their results need no memory.

`JoinedKernels` follows kernels that run inside of the one that makes what they read, as XLA for TPUs fuses elementwise
operators and sums: what reads the result of a product, or of an elementwise kernel, and besides it only what is there
before that kernel begins. A sum ends with its kernel, so that what reads the sum begins after it.

The update of a parameter is one kernel, which reads every value once. What an elementwise operator of the update makes,
or has read, of the size of its result, is there for the others of that size: new moments are not read again for the new
parameter. Adam in f32 so reads 16 bytes a parameter, and writes 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster import Cluster
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.phases import phase_of
from autopar.ir.primitives import DENSE_CONTRACTIONS, is_fusible
from autopar.search.intra.sharding_problem import ValueDraft

#: Values that are computed from no more than this are computed from constants.
CONSTANT_BYTES = 64

#: A value at least this many times as large as what it is computed from is computed again by every reader. Compilers
#: for accelerators do so with all elementwise operators, which they can fuse into any number of readers; that for CPUs
#: only where the expensive ones among them (exponentials, divisions) make much of little.
GROWTH, CPU_GROWTH = 0.95, 1.9


def is_recomputed(op: Operator, basis_bytes: float, growth: float) -> bool:
    """Whether compilers compute the results of an elementwise operator where they are read, by several readers too.

    So they do with masks, one-hot codes, broadcasts, and conversions to a wider dtype: reading what they are made of
    takes less than writing and reading them would.

    Args:
        op: the operator.
        basis_bytes: bytes of the stored values that its results are computed from.
        growth: from `growth_of`.
    """
    return is_fusible(op) and growth * basis_bytes <= sum(v.type.nbytes for v in op.results)


def is_constant(op: Operator, stored_bytes: float) -> bool:
    """Whether constants alone decide the results: compilers compute them where they are read, inside of loops too.

    Args:
        op: the operator.
        stored_bytes: bytes of the values in memory that its results are computed from.
    """
    return is_fusible(op) and stored_bytes <= CONSTANT_BYTES


def growth_of(cluster: Cluster) -> float:
    """`CPU_GROWTH` where a device is a CPU, else `GROWTH`."""
    return CPU_GROWTH if any("cpu" in d.jax_kinds for d in cluster.device_types) else GROWTH


@dataclass
class JoinedKernels:
    """When the kernel began in which each value so far is computed.

    Args:
        begins: by key of a value that a kernel hands on as it computes it, the time of that kernel's beginning.
    """

    begins: dict[str, int] = field(default_factory=dict)

    def begin(self, op: Operator, keys: Iterable[str], time: int) -> None:
        """Notes that a product begins a kernel, which elementwise operators after it may join.

        Args:
            op: the operator.
            keys: of its results.
            time: of the operator.
        """
        if op.primitive in DENSE_CONTRACTIONS:
            self.begins.update(dict.fromkeys(keys, time))

    def read(
        self, op: Operator, keys: Iterable[str], stored: Iterable[str], values: Mapping[str, ValueDraft], time: int
    ) -> list[TensorType]:
        """Types of the values that a kernel reads from memory, those left out that its own kernel makes.

        Args:
            op: the operator that it ends in.
            keys: of the operator's results.
            stored: keys of the values in memory that its operands are computed from.
            values: all values.
            time: of the operator.
        """
        times = {key: values[key].time for key in sorted(stored)}
        last = max(times, key=lambda key: times[key], default="")
        begin = self.begins.get(last, time)
        joins = begin < time and all(at < begin for key, at in times.items() if self.begins.get(key) != begin)
        if not joins:
            begin = time
        if is_fusible(op):
            self.begins.update(dict.fromkeys(keys, begin))
        return [values[key].type for key in times if not joins or self.begins.get(key) != begin]


@dataclass(frozen=True)
class StoredTypes:
    """Values in memory that results are computed from.

    Args:
        items: (key, type) of the values, sorted.
    """

    items: tuple[tuple[str, TensorType], ...]

    @cached_property
    def types(self) -> tuple[TensorType, ...]:
        """Types of them."""
        return tuple(type for _, type in self.items)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.nbytes for t in self.types)


@dataclass
class UpdateStreams:
    """Values that kernels of the update have read and made so far.

    Args:
        there: keys of values.
    """

    there: set[str] = field(default_factory=set)

    def read(self, op: Operator, stored: StoredTypes, transient: bool) -> list[TensorType]:
        """Types of the values in memory that a kernel of the update reads first, of those that it needs.

        Args:
            op: the operator that it ends in.
            stored: values in memory that its operands are computed from.
            transient: the operator is part of the kernels that read it: these read for it.
        """
        size = max((v.type.size for v in op.results), default=0)
        fresh = [(key, type) for key, type in stored.items if type.size != size or key not in self.there]
        if not transient:
            self.there |= {key for key, type in fresh if type.size == size} | {v.name for v in op.results}
        return [type for _, type in fresh]


def has_backward(graph: Graph) -> bool:
    """Whether a graph has a backward pass; operators outside of both passes are then the update."""
    return any(
        phase_of(op) == "backward" or any(has_backward(region) for _, region in op.regions) for op in graph.operators
    )
