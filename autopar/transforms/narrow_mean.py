"""`narrow_mean`: gradients of replicas are averaged in a narrow format (qgZ of ZeRO++, 2023; EQuARX, 2025).

One all-to-all of codes, sums in float32, one gather of codes: see `autopar.transforms.formats.mean_over_replicas`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.transforms.formats import Format, format_of, mean_over_replicas
from autopar.transforms.optimizers import Transformation, check_stacked
from autopar.transforms.replicas import check_replicas


def narrow_mean(format: str | Format, replicas: int, *, seed: int | None = None) -> Transformation:
    """A transformation from gradients of replicas to their mean, sent in ``format``; it changes what is computed.

    Args:
        format: of what is sent, as "int8".
        replicas: k, the leading dim of every gradient, as `per_replica_value_and_grad` makes them.
        seed: rounds up or down at random, with keys from it; None rounds to nearest.

    Raises:
        AutoparError: an option is wrong; when called, gradients have no dim of replicas.
    """
    check_replicas(replicas)
    narrow = format_of(format)

    def init(params: Any) -> Any:
        return () if seed is None else jnp.zeros((), jnp.int32)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_stacked(gradients, replicas)
        leaves, treedef = jax.tree.flatten(gradients)
        keys: list[Any] = [None] * len(leaves)
        if seed is not None:
            keys = list(jax.random.split(jax.random.fold_in(jax.random.key(seed), state), len(leaves)))
            state = state + 1
        means = [mean_over_replicas(leaf, narrow, key) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(treedef, means), state

    return Transformation(init, update)
