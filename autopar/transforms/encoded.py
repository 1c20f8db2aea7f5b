"""`encoded` and `packed_masks`: what waits for the backward pass in exact codes (Gist, Jain et al., ISCA'18)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax

from autopar.transforms.codes import mask_bits
from autopar.transforms.split import split


def encoded(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with what its forward pass leaves for the backward pass in fewer bits; the same results, to the bit.

    Masks are bits, as of `packed_masks`, and of the maxima of windows (max-pooling) only the place of each largest
    element is kept, in 4 bits at most.

    Args:
        step: a plain train step, ``step(*args)``.

    Raises:
        TraceError: when called: the step differentiates nothing, or has two updates.
    """

    return _holding(step, "encoded", places=True)


def packed_masks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with masks of its forward pass held as bits; results are those of ``step``, to the bit.

    Masks inside loops, those that loops read, and those of which no dim is a multiple of 8 stay bytes.

    Args:
        step: a plain train step, ``step(*args)``.

    Raises:
        TraceError: when called: the step differentiates nothing, or has two updates.
    """

    return _holding(step, "packed", places=False)


def _holding(step: Callable[..., Any], name: str, *, places: bool) -> Callable[..., Any]:
    """``step``, called ``name`` and its own name, with masks as bits, and with ``places`` of maxima."""

    @wraps(step)
    def coded(*args: Any, **kwargs: Any) -> Any:
        return split(partial(step, **kwargs), args).holding(jax.tree.leaves(args), mask_bits, places=places)

    coded.__name__ = f"{name}_{getattr(step, '__name__', 'step')}"
    return coded
