"""`narrow_parameters` and `narrow_mean`: parameters and gradients that are sent in narrow formats.

`narrow_parameters`: forward and backward passes read parameters that went through a narrow format.

    g(t) = G(decode(encode(W(t))), batch);    W(t+1) = U(W(t), g(t))

Where a plan splits parameters, what it gathers for the passes is then codes and scales (qwZ of ZeRO++, Wang et al.,
2023, section 3.1): q + 32 / B bits an element in place of 32. Masters, and the update, are not rounded.

`narrow_mean`: gradients of replicas are averaged in a narrow format (qgZ of ZeRO++, 2023; EQuARX, 2025): one
all-to-all of codes, sums in float32, one gather of codes. Codes and scales are `autopar.transforms.formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.formats import WireFormat
from autopar.transforms.formats import Format, format_of, mean_over_replicas
from autopar.transforms.optimizers import Transformation, check_stacked
from autopar.transforms.replicas import check_replicas
from autopar.transforms.split import split
from autopar.transforms.state import Parameters, parameter_leaves, replaced, taken


def narrow_parameters(
    step: Callable[..., Any], format: str | WireFormat = "int8", *, params: Parameters = "params"
) -> Callable[..., Any]:
    """``step`` with gradients of its parameters as ``format`` says them; its state and results are as they were.

    Matrices and what has more dims are rounded, vectors are not. An element that is read is at most `Format.bound` from
    the master's.

    Args:
        step: a plain train step, ``step(state, *batch)``.
        format: one of `FORMATS`, a `Format`, or what ``wire=`` takes.
        params: where the parameters lie in the state.

    Raises:
        AutoparError: there is no such format.
        TraceError: when called: the step differentiates nothing, or has two updates.
    """
    narrow = format_of(format)
    assert narrow is not None, "a name is a format"

    def read(leaf: Any) -> Any:
        wide = jnp.ndim(leaf) >= 2 and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return narrow.rounded(leaf) if wide else leaf

    @wraps(step)
    def narrowed(state: Any, *args: Any, **kwargs: Any) -> Any:
        indices = parameter_leaves(state, params)
        cut = split(partial(step, **kwargs), (state, *args))
        rest = jax.tree.leaves(args)
        rounded = replaced(state, indices, tuple(map(read, taken(state, indices))))
        crossing = cut.gradients([*jax.tree.leaves(rounded), *rest])
        return cut.update([*jax.tree.leaves(state), *rest], crossing)

    narrowed.__name__ = f"narrow_{getattr(step, '__name__', 'step')}"
    return narrowed


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
