"""Parts that gradient transformations share: optax's pair of functions, and the shape of stacked gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from autopar.errors import AutoparError


class Transformation(NamedTuple):
    """Two functions as `optax.GradientTransformation` has them; `optax.chain` takes it.

    Args:
        init: ``init(params) -> state``.
        update: ``update(gradients, state, params=None) -> (updates, state)``.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def check_stacked(gradients: Any, replicas: int) -> None:
    """Raises AutoparError unless every leaf of ``gradients`` has a leading dim of ``replicas``."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        if leaf.ndim == 0 or leaf.shape[0] != replicas:
            raise AutoparError(
                f"gradients{jax.tree_util.keystr(path)}, {leaf.shape}, has no leading dim of {replicas} replicas",
                cause="the gradients were summed over the batch already",
                remedy="take them by autopar.transforms.per_replica_value_and_grad",
            )
