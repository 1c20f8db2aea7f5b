"""`powersgd`: gradients of replicas are exchanged as factors of low rank (Vogels et al., NeurIPS'19, algorithm 1).

Of each matrix (n x m) of replica i, with its error e_i and the factor Q (m x r) of the step before:

    M_i = g_i + e_i;   P = orthogonalize(mean_i(M_i Q));   Q = mean_i(M_i^T P);   M' = P Q^T;   e_i = M_i - M'

r (n + m) numbers are exchanged instead of n m, and each step ``sum(sent) + mean(errors) = sum(gradients)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import AutoparError
from autopar.transforms.optimizers import Transformation, check_stacked
from autopar.transforms.replicas import check_replicas


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PowerSgdState:
    """Errors and factors, a leaf a parameter; of parameters that are not compressed both are empty.

    Args:
        errors: ``[replicas, *shape]``.
        factors: Q, ``[m, r]``.
    """

    errors: tuple[Any, ...]
    factors: tuple[Any, ...]


def powersgd(rank: int, replicas: int, *, min_compression: float = 2.0, seed: int = 0) -> Transformation:
    """A transformation from gradients of replicas to their mean, exchanged at low rank; it changes what is computed.

    ``optax.chain(powersgd(2, k), optax.sgd(rate, momentum=0.9))`` takes the gradients of `per_replica_value_and_grad`.

    Args:
        rank: r, at most the smaller side of each matrix.
        replicas: k, the leading dim of every gradient.
        min_compression: matrices for which ``n m / (r (n + m))`` is not above it, and vectors, are sent whole. Tensors
            of more dims are matrices of their first dim and the rest.
        seed: of the first factors.

    Raises:
        AutoparError: an option is wrong; when called, gradients have no dim of replicas.
    """
    check_replicas(replicas)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AutoparError(f"rank={rank!r} is no rank", remedy="give a positive number; 1, 2 or 4 are usual")

    def init(params: Any) -> PowerSgdState:
        leaves = jax.tree.leaves(params)
        keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
        errors, factors = [], []
        for leaf, key in zip(leaves, keys, strict=True):
            width = rank_of(leaf.shape, rank, min_compression)
            compressed = width > 0
            errors.append(jnp.zeros((replicas, *leaf.shape) if compressed else (0,), leaf.dtype))
            columns = int(np.prod(leaf.shape[1:])) if compressed else 0
            factors.append(jax.random.normal(key, (columns, width), leaf.dtype))
        return PowerSgdState(tuple(errors), tuple(factors))

    def update(gradients: Any, state: PowerSgdState, params: Any = None) -> tuple[Any, PowerSgdState]:
        check_stacked(gradients, replicas)
        leaves, treedef = jax.tree.flatten(gradients)
        rows = [_compressed(*row) for row in zip(leaves, state.errors, state.factors, strict=True)]
        sent, errors, factors = ([row[n] for row in rows] for n in range(3))
        return jax.tree.unflatten(treedef, sent), PowerSgdState(tuple(errors), tuple(factors))

    return Transformation(init, update)


def rank_of(shape: tuple[int, ...], rank: int, min_compression: float) -> int:
    """The rank at which a parameter of ``shape`` is sent; 0: whole. See `powersgd`."""
    if len(shape) < 2 or 0 in shape:
        return 0
    n, m = shape[0], int(np.prod(shape[1:]))
    width = min(rank, n, m)
    return width if n * m > min_compression * width * (n + m) else 0


def _compressed(gradient: Any, error: Any, factor: Any) -> tuple[Any, Any, Any]:
    """(what all replicas get, errors, factor) of one parameter."""
    if not factor.size:
        return jnp.mean(gradient, axis=0), error, factor
    shape = gradient.shape
    matrices = (gradient + error).reshape(shape[0], shape[1], -1)
    left = jnp.mean(matrices @ factor, axis=0)
    left = jnp.linalg.qr(left)[0]
    factor = jnp.mean(jnp.swapaxes(matrices, 1, 2) @ left, axis=0)
    sent = left @ factor.T
    return sent.reshape(shape[1:]), (matrices - sent).reshape(shape), factor
