"""`Precision`: in which dtype which operators of a train step compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.errors import AutoparError

#: Products: they take narrow operands and add up in float32.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})

#: Operators that compute in the dtype of their operands, and do so narrow where those are.
FOLLOWING = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "max", "min", "sign", "clamp", "square",
        "one_minus_square", "integer_pow", "tanh", "erf",
        "logistic", "sin", "cos", "add_any", "select_n", "copy", "stop_gradient",
        "eq", "ne", "lt", "le", "gt", "ge", "is_finite",
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice", "dynamic_slice", "pad",
        "concatenate", "gather", "dynamic_update_slice", "reduce_window_max",
    }
)  # fmt: skip

#: What stays in float32 though it could follow. Operators that are in neither table (exponentials, logarithms, roots,
#: sums and other reductions, scatters, factorizations) compute in float32 as well.
DENIED = frozenset({"erf_inv", "reduce_max", "reduce_min"})

_NAMES = ("bf16", "f16", "f8", "mxf8")


@dataclass(frozen=True)
class Precision:
    """Mixed precision of a plain float32 step.

    Parameters and optimizer state stay in float32. In the forward and backward pass products take narrow copies and add
    up in float32; what they make is kept and goes on narrow through operators that follow (`FOLLOWING`); gradients are
    float32 before the update. What the step itself states in another dtype than float32 stays as it is.

    Args:
        compute: "bf16" or "f16"; "f8" or "mxf8" for bf16 whose products take operands in 8 bits, with a scale a tensor
            or a scale a block of 32.
        deny: names of primitives that stay in float32, besides those that are in neither table.
        deny_scopes: parts of name stacks (`jax.named_scope`, modules of flax) whose operators stay in float32.
    """

    compute: str = "bf16"
    deny: frozenset[str] = DENIED
    deny_scopes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute not in _NAMES:
            raise AutoparError(
                f"compute={self.compute!r} is not a dtype of mixed precision", remedy=f"one of {', '.join(_NAMES)}"
            )
        object.__setattr__(self, "deny", frozenset(_names("deny", self.deny)))
        object.__setattr__(self, "deny_scopes", tuple(_names("deny_scopes", self.deny_scopes)))

    def denies(self, primitive: str, scope: str) -> bool:
        """Whether an operator stays in float32, by its name and name stack."""
        return primitive in self.deny or any(part in scope for part in self.deny_scopes)


def precision_of(given: str | Precision | None) -> Precision | None:
    """Precision called by a name, as "bf16".

    Raises:
        AutoparError: there is none of that name.
    """
    if given is None or isinstance(given, Precision):
        return given
    if not isinstance(given, str) or given not in _NAMES:
        raise AutoparError(
            f"precision={given!r} is no precision",
            remedy='precision="bf16", "f16", "f8", "mxf8" or an autopar.Precision',
        )
    return Precision(given)


def _names(what: str, given: Iterable[str]) -> Iterable[str]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise AutoparError(f"{what}={given!r} are no names", remedy=f'{what}=("tanh",)')
    return given
