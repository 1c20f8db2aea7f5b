"""Finds operators that a compiler fuses into their neighbours, so that their results need no memory."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.ir import Operator
from autopar.ir.primitives import is_fusible

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
