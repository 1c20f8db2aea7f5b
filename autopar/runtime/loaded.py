"""`LoadedProgram`: what a compiled step can do, wherever its devices are; and what all of them know of their inputs.

The programs of one process, of a world of processes and of workers on Ray are a `LoadedStep` each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import NamedSharding

from autopar.frontend import Traced
from autopar.runtime.leaves import fits
from autopar.schedule import Work
from autopar.schedule.memory import WorkerMemory


class Shardings(Protocol):
    """Shardings of inputs and outputs of a program."""

    @property
    def input_shardings(self) -> tuple[NamedSharding, ...]:
        """Sharding of each input."""

    @property
    def output_shardings(self) -> tuple[NamedSharding, ...]:
        """Sharding of each output."""


@dataclass(frozen=True, eq=False)
class StepShardings:
    """`Shardings` of a loaded step."""

    input_shardings: tuple[NamedSharding, ...]
    output_shardings: tuple[NamedSharding, ...]


class LoadedProgram(Protocol):
    """A step on the devices that run it: one stage or several of this process, or workers elsewhere."""

    @property
    def here(self) -> bool:
        """Whether its devices are those of this process, so that its results are jax's arrays on them."""

    @property
    def program(self) -> Shardings:
        """Shardings of inputs and outputs."""

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of inputs whose buffers are given up."""

    @property
    def executable(self) -> Any:
        """Texts, memory and cost statistics, as jax's compiled object has them."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that it needs."""

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker of a pipeline of this process; empty for other programs."""

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, placed as `run` takes them."""

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them, to be kept by the caller."""

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """

    def timed(self, note: Callable[[Work, float], None]) -> LoadedProgram:
        """The same program, which tells ``note`` the seconds of each of its parts that it can time."""

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` made where the step's ``inputs`` are read.

        Args:
            function: arrays -> arrays.
            arguments: what it is called with.
            inputs: indices of the inputs of the step that its results are to be.
        """


@dataclass(frozen=True, eq=False)
class LoadedStep:
    """Inputs of a loaded step.

    Args:
        entries: (shape, dtype, weak type) of each input.
        names: path of each input, for messages.
        donated: indices of inputs whose buffers the caller gives up.
        constants: arrays that the function closes over, placed.
    """

    entries: tuple[Any, ...]
    names: tuple[str, ...]
    donated: tuple[int, ...]
    constants: tuple[Any, ...]
    here = True

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        return self.place_all(leaves) if fits(leaves, self.entries) else None

    @abstractmethod
    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where a step takes them.

        Raises:
            AutoparError: a leaf was donated to an earlier call, or has no data.
        """

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them: as `place_all` places them."""
        return self.place_all(leaves)


def described_inputs(
    traced: Traced, donated: Iterable[int]
) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[int, ...]]:
    """Entries, names and donated indices of a `LoadedStep`.

    Args:
        traced: the function.
        donated: indices of the inputs that the caller gives up.
    """
    signature = traced.signature
    entries = tuple(signature.entries[i] for i in signature.traced)
    return entries, tuple(i.name for i in traced.graph.inputs), tuple(sorted(donated))
