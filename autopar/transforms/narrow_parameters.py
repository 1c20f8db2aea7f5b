"""`narrow_parameters`: forward and backward passes read parameters that went through a narrow format.

    g(t) = G(decode(encode(W(t))), batch);    W(t+1) = U(W(t), g(t))

Where a plan splits parameters, what it gathers for the passes is then codes and scales (qwZ of ZeRO++, Wang et al.,
2023, section 3.1): q + 32 / B bits an element in place of 32. Masters, and the update, are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.formats import WireFormat
from autopar.transforms.formats import format_of
from autopar.transforms.parameters import Parameters, parameter_leaves, replaced, taken
from autopar.transforms.split import split


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
