"""`UnflushedProgram`: what programs of pipelines without a flush have in common with the pipeline that they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autopar.runtime.local_pipeline import PipelineProgram
from autopar.schedule import Work


@dataclass(frozen=True, eq=False)
class UnflushedProgram:
    """A pipeline without a flush on this process's devices; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        pipeline: its programs, and where inputs and outputs lie.
    """

    pipeline: PipelineProgram

    @property
    def here(self) -> bool:
        """Whether its devices are those of this process: yes."""
        return True

    @property
    def program(self) -> Any:
        """Where inputs and outputs lie."""
        return self.pipeline.program

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of inputs whose buffers are given up: none, as versions of them are read later."""
        return ()

    @property
    def executable(self) -> Any:
        """Texts and memory of all programs."""
        return self.pipeline.executable

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, each on the stage that has it first."""
        return self.pipeline.place_all(leaves)

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them."""
        return self.pipeline.shard_all(leaves)

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """See `autopar.runtime.loaded.LoadedProgram`."""
        return self.pipeline.make(function, arguments, inputs)

    def timed(self, note: Callable[[Work, float], None]) -> Self:
        """This program, with every part waited for."""
        return dataclasses.replace(self, pipeline=self.pipeline.timed(note))
