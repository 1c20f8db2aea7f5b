"""The error of ``jax_debug_nans`` and ``jax_debug_infs``, which compiled programs raise as a private type."""

from __future__ import annotations


def floating_point_error(error: BaseException, name: str) -> FloatingPointError | None:
    """The error that a jitted function raises where a compiled program raised ``error``; None for other errors.

    Args:
        error: what a compiled program raised.
        name: of the function.
    """
    if type(error).__name__ != "InternalFloatingPointError":
        return None
    what = getattr(error, "ty", "nan")
    return FloatingPointError(
        f"invalid value ({what}) encountered in the results of {name}; the plain function under jax.disable_jit() says "
        "in which operator"
    )
