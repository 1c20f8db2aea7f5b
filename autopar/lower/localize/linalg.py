"""Localizers of factorizations and solves: on CPU devices the matrices of a batch run one after another.

The LAPACK kernels of jaxlib hand the matrices of a batch to the threads on which XLA runs its CPU devices, and wait for
them. Where as many devices do so at the same time as there are threads, all of them wait and none is left to compute:
the program never ends. A kernel that is given one matrix computes it itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.ir.primitives import OF_MATRICES
from autopar.lower.localize.base import LocalContext, Localizer

#: Dims of the first operand that are no batch.
_CORE: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys((*sorted(OF_MATRICES), "ormqr", "triangular_solve"), 2), "tridiagonal_solve": 1}
)


def one_by_one(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The operator on each matrix of a batch where several CPU devices run it, on all at once elsewhere."""
    batch = operands[0].shape[: operands[0].ndim - _CORE[primitive.name]]
    together = partial(_together, primitive, params)
    same = all(a.shape[: len(batch)] == batch for a in operands)
    if not same or math.prod(batch) < 2 or math.prod(context.sizes.values()) == 1:
        return together(*operands)
    return list(lax.platform_dependent(*operands, cpu=partial(_mapped, together, batch), default=together))


def _together(primitive: Primitive, params: Mapping[str, Any], *operands: Any) -> list[Any]:
    return bind(primitive, params, list(operands))


def _mapped(together: Any, batch: tuple[int, ...], *operands: Any) -> list[Any]:
    rows = tuple(a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in operands)
    results = lax.map(lambda matrices: together(*matrices), rows)
    return [r.reshape(*batch, *r.shape[1:]) for r in results]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(dict.fromkeys(_CORE, one_by_one))
