"""`Twin`: a value of a float32 program in float32, narrow, or both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass
class Twin:
    """A value, and its copies in the dtypes in which it was asked for.

    Args:
        wide: as the program states it; None where only the narrow one was computed.
        narrow: None where nobody asked for it.
        follows: whether elementwise operators go on with the narrow one.
        parameter: whether it is a parameter, which goes narrow where another operand does.
        cotangent: whether the backward pass made it, and no recomputation.
        codes: what products took of it in 8 bits, by what they asked for.
    """

    wide: Any = None
    narrow: Any = None
    follows: bool = False
    parameter: bool = False
    cotangent: bool = False
    codes: dict[Any, Any] = field(default_factory=dict)

    def stored(self, narrow: bool, dtype: Any) -> Any:
        """The narrow copy, or the value as the program states it."""
        return self.as_narrow(dtype) if narrow else self.as_wide()

    def as_wide(self) -> Any:
        """The value as the program states it."""
        if self.wide is None:
            self.wide = jax.lax.convert_element_type(self.narrow, jnp.float32)
        return self.wide

    def at_hand(self) -> Any:
        """The value in whichever dtype it is there, the narrow one first."""
        return self.wide if self.narrow is None else self.narrow

    def as_narrow(self, dtype: Any) -> Any:
        """The narrow copy."""
        if self.narrow is None and is_constant(self.wide):
            self.narrow = np.asarray(self.wide).astype(dtype)
        elif self.narrow is None:
            self.narrow = jax.lax.convert_element_type(self.wide, dtype)
        return self.narrow


def is_wide(aval: Any) -> bool:
    """Whether a value is float32, which is all that precision changes."""
    return bool(getattr(aval, "dtype", None) == jnp.float32)


def is_constant(value: Any) -> bool:
    """Whether a value is written into the program."""
    return isinstance(value, np.ndarray | np.generic | float | int)
