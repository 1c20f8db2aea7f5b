"""`encoded`: activations wait for the backward pass in the codes of Gist (Jain et al., ISCA'18)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.transforms.codes import FORMATS, Code, mask_bits, rounded
from autopar.transforms.split import split


def encoded(step: Callable[..., Any], activations: str | None = None) -> Callable[..., Any]:
    """``step`` with what its forward pass leaves for the backward pass held in fewer bits.

    Masks are bits, and of the maxima of windows (max-pooling) only the place of each largest element is kept, in 4 bits
    at most: both exact, to the bit. Activations are rounded by name alone; the forward pass computes with them
    as they are, the backward pass with what is held (delayed precision reduction).

    Args:
        step: a plain train step, ``step(*args)``.
        activations: "bf16", "f16" or "f8" (e4m3): the format of float32 activations; None holds them as they are.

    Raises:
        AutoparError: there is no such format.
        TraceError: when called: the step differentiates nothing, or has two updates.
    """
    if activations is not None and activations not in FORMATS:
        raise AutoparError(
            f"activations={activations!r} is no format of activations",
            remedy=f"activations={', '.join(map(repr, FORMATS))} or None",
        )

    def code_of(value: Any) -> Code | None:
        return mask_bits(value) or (None if activations is None else rounded(value, activations))

    @wraps(step)
    def held(*args: Any, **kwargs: Any) -> Any:
        return split(partial(step, **kwargs), args).holding(jax.tree.leaves(args), code_of, places=True)

    held.__name__ = f"encoded_{getattr(step, '__name__', 'step')}"
    return held


def packed_masks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with masks of its forward pass held as bits; results are those of ``step``, to the bit.

    Masks inside loops, those that loops read, and those of which no dim is a multiple of 8 stay bytes.

    Args:
        step: a plain train step, ``step(*args)``.

    Raises:
        TraceError: when called: the step differentiates nothing, or has two updates.
    """

    @wraps(step)
    def packed(*args: Any, **kwargs: Any) -> Any:
        return split(partial(step, **kwargs), args).holding(jax.tree.leaves(args), mask_bits)

    packed.__name__ = f"packed_{getattr(step, '__name__', 'step')}"
    return packed
