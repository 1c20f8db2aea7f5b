"""`AdjustedStack`: the program that runs on a cluster, with constants of its own; and the plain form of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.cluster.checks import positive, text
from autopar.errors import ClusterError

#: The program that runs where nothing else is said: one that XLA compiled.
DEFAULT_STACK = "xla"


@dataclass(frozen=True)
class AdjustedStack:
    """A training program that differs from a known one in some constants.

    Args:
        name: the known one, of ``cost_models/training/constants.toml``.
        constants: numbers by table and key of that file, as ``(("kernels.half_depth", 300.0),
            ("stacks.megatron.wait_s", 2e-4))``; kept in the order of their keys.

    Raises:
        ClusterError: a value is no number of 0 or more. `autopar.cost.constants.constants_of` refuses unknown keys.
    """

    name: str
    constants: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        text("stack.name", self.name)
        values = {text("stack.constants", k): positive(k, v, zero=True) for k, v in self.constants}
        object.__setattr__(self, "constants", tuple(sorted(values.items())))

    def __str__(self) -> str:
        return f"{self.name}, adjusted"


#: A training program by name, or with constants of its own.
StackChoice: TypeAlias = str | AdjustedStack


def stack_of(data: Any) -> StackChoice:
    """The stack of its plain form, read strictly; ClusterError if it is none."""
    if not isinstance(data, Mapping):
        return data if isinstance(data, AdjustedStack) else text("stack", data)
    if set(data) != {"name", "constants"} or not isinstance(data["constants"], Mapping):
        raise ClusterError(f"stack is {dict(data)!r}", remedy="give a name, or a table of `name` and `constants`")
    return AdjustedStack(data["name"], tuple(data["constants"].items()))


def plain_stack(stack: StackChoice) -> Any:
    """The plain form of a stack: its name, or a table of name and constants."""
    return stack if isinstance(stack, str) else {"name": stack.name, "constants": dict(stack.constants)}
