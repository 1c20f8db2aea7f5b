"""`LoadedProgram`: what a compiled step can do, wherever its devices are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.sharding import NamedSharding

from autopar.schedule import Work
from autopar.schedule.memory import WorkerMemory


class Shardings(Protocol):
    """Shardings of inputs and outputs of a program."""

    @property
    def input_shardings(self) -> tuple[NamedSharding, ...]:
        """Sharding of each input."""
        ...

    @property
    def output_shardings(self) -> tuple[NamedSharding, ...]:
        """Sharding of each output."""
        ...


class LoadedProgram(Protocol):
    """A step on the devices that run it: one stage or several of this process, or workers elsewhere."""

    @property
    def here(self) -> bool:
        """Whether its devices are those of this process, so that its results are jax's arrays on them."""
        ...

    @property
    def program(self) -> Shardings:
        """Shardings of inputs and outputs."""
        ...

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of inputs whose buffers are given up."""
        ...

    @property
    def executable(self) -> Any:
        """Texts, memory and cost statistics, as jax's compiled object has them."""
        ...

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that it needs."""
        ...

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker of a pipeline of this process; empty for other programs."""
        ...

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        ...

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, placed as `run` takes them."""
        ...

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them, to be kept by the caller."""
        ...

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """
        ...

    def timed(self, note: Callable[[Work, float], None]) -> LoadedProgram:
        """The same program, which tells ``note`` the seconds of each of its parts that it can time."""
        ...

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` made where the step's ``inputs`` are read.

        Args:
            function: arrays -> arrays.
            arguments: what it is called with.
            inputs: indices of the inputs of the step that its results are to be.
        """
        ...
