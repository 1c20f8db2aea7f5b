"""The constants that are fitted: where they stand, what they are without a run that says so, what they can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from autopar.cluster import AdjustedStack
from autopar.cluster.stack import StackChoice
from autopar.cost.constants import Constants, load_constants


@dataclass(frozen=True)
class Free:
    """A constant that is fitted.

    Args:
        table: its table in the file.
        key: its key there.
        prior: its value where no run says anything of it: what physics or the program's source would make it.
        low, high: what it can be.
        also: other tables whose key has the same value.
    """

    table: str
    key: str
    prior: float
    low: float
    high: float
    also: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables that hold it."""
        return (self.table, *self.also)


_EAGER = ("stacks.megatron", "stacks.eager")
_CORE = "stacks.megatron-core"
_SPEED = "stacks.megatron-deepspeed"
FREE = (
    Free("kernels", "half_waves", 0.1, 0.01, 3.0),
    Free("kernels", "half_depth", 128.0, 8.0, 1024.0),
    Free("kernels", "misaligned_share", 0.5, 0.1, 1.0),
    Free(_SPEED, "start_s", 4e-5, 4e-6, 4e-4, _EAGER),
    Free(_SPEED, "start_backward_s", 3e-5, 3e-6, 3e-4, _EAGER),
    Free(_SPEED, "collective_s", 3e-5, 1e-6, 1e-3, _EAGER),
    Free(_SPEED, "step_s", 1e-3, 1e-5, 1e-1, _EAGER),
    Free(_SPEED, "wait_s", 1e-4, 1e-6, 2e-3, _EAGER),
    Free(_SPEED, "core_traffic", 1.5, 0.2, 8.0, ("stacks.eager",)),
    # Fused kernels read and write less than what XLA keeps: half the passes of a norm, all of an activation.
    Free(_SPEED, "traffic", 0.7, 0.1, 3.0, (*_EAGER, _CORE)),
    Free(_SPEED, "partition_bytes", 10.0, 1.0, 200.0),
    Free("stacks.megatron", "core_traffic", 0.8, 0.2, 8.0),
)
NETWORK = (Free("network", "level_s", 2e-5, 1e-6, 2e-4), Free("network", "ramp", 1.0, 0.01, 3.0))


def with_values(constants: Constants, free: Sequence[Free], values: Sequence[float]) -> Constants:
    """``constants`` with other values."""
    return constants.with_values(_pairs(free, values))


def stack_with(name: str, constants: Constants) -> StackChoice:
    """A stack with the fitted ones of ``constants``, to plan with; its name alone where they are those of the file."""
    free = (*FREE, *NETWORK)
    fitted = [value_of(constants, f) for f in free]
    known = load_constants()
    if fitted == [value_of(known, f) for f in free]:
        return name
    return AdjustedStack(name, tuple(_pairs(free, fitted)))


def _pairs(free: Sequence[Free], values: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Paths of constants in the file and their values."""
    for f, value in zip(free, values, strict=True):
        yield from ((f"{table}.{f.key}", float(value)) for table in f.tables)


def value_of(constants: Constants, free: Free) -> float:
    """The present value of a constant."""
    found: Any = msgspec.to_builtins(constants)
    for part in (*free.table.split("."), free.key):
        found = found[part]
    return float(found)


def at_priors(constants: Constants) -> Constants:
    """``constants`` with the prior of each that is fitted: what does not change when they are fitted again."""
    return with_values(constants, (*FREE, *NETWORK), [f.prior for f in (*FREE, *NETWORK)])
