"""`interchanged`: all microbatches go through a layer before the next one (L2L, Pudipeddi et al., 2020, algorithm 2).

    for each layer l:  for each microbatch u:  y(l + 1, u) = f(y(l, u), w(l))
    for each layer l, backward:  dw(l) = sum over u of the gradient of f at y(l, u), which is computed again

A layer's parameters are taken once for all microbatches, and what waits inside of a layer is that of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.errors import AutoparError


def interchanged(layer: Callable[[Any, Any], tuple[Any, Any]], count: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A layer that computes one microbatch after the other, for ``jax.lax.scan`` over layers; see docs/transforms.md.

    Args:
        layer: ``layer(values, parameters) -> (values, out)``, as ``jax.lax.scan`` takes it, with the parameters of one
            layer. Each array of ``values`` and ``out`` has examples in its first dim, which it treats independently.
        count: of microbatches. It divides the examples: microbatch u has those whose number is u modulo ``count``.

    Returns:
        The same function of all examples. Its backward pass computes each microbatch's layer again.

    Raises:
        AutoparError: ``count`` is less than 1; when called: an array has no dim of examples, or another number of them
            than the first one, or they are no multiple of ``count``.
    """
    if count < 1:
        raise AutoparError(f"interchanged: {count} microbatches", remedy="1 or more")
    again = jax.checkpoint(layer)

    @wraps(layer)
    def by_microbatch(values: Any, parameters: Any) -> tuple[Any, Any]:
        examples = _examples(values, count)

        def microbatch(_: None, piece: Any) -> tuple[None, tuple[Any, Any]]:
            return None, again(piece, parameters)

        def dealt(array: Any) -> Any:
            return jnp.moveaxis(array.reshape(examples // count, count, *array.shape[1:]), 1, 0)

        def joined(array: Any) -> Any:
            if array.ndim < 2 or array.shape[1] != examples // count:
                raise AutoparError(
                    f"interchanged: the layer makes {array.shape[1:]} of {examples // count} examples",
                    cause="it adds examples up, or returns a number",
                    remedy="return what each example adds, with examples in the first dim, and add it up outside",
                )
            return jnp.moveaxis(array, 0, 1).reshape(examples, *array.shape[2:])

        _, results = lax.scan(microbatch, None, jax.tree.map(dealt, values))
        whole: tuple[Any, Any] = jax.tree.map(joined, results)
        return whole

    return by_microbatch


def _examples(values: Any, count: int) -> int:
    """Number of examples of all arrays."""
    shapes = [jnp.shape(array) for array in jax.tree.leaves(values)]
    first = {shape[0] if shape else None for shape in shapes}
    (examples,) = first if len(first) == 1 else (None,)
    if examples is None or examples % count:
        raise AutoparError(
            f"interchanged: {count} microbatches of arrays {', '.join(map(str, shapes)) or 'that are none'}",
            cause="what goes from layer to layer has not the examples in its first dim, or their number is no multiple",
            remedy="carry arrays [examples, ...] alone, of a number of examples that microbatches divide",
        )
    return int(examples)
