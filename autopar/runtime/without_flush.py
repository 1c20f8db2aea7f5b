"""`UnflushedProgram`: what programs of pipelines without a flush have in common with the pipeline that they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autopar.runtime.local_pipeline import PipelineProgram
from autopar.schedule import Buffer, Dataflow, Work
from autopar.schedule.stale_flow import METRICS, SHARED


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


def outputs_of_updates(
    dataflow: Dataflow, replaces: Mapping[str, str], array: Callable[[int, Buffer], Any], *, metrics: bool = True
) -> dict[int, Any]:
    """Outputs of the step by number: the newest state, and what else its updates return.

    Args:
        dataflow: works; the update has the parts of `autopar.schedule.stale_flow`.
        replaces: by value that the update writes the input that it is the next of.
        array: what a stage has in a buffer.
        metrics: whether that is wanted which is no state.
    """
    outputs: dict[int, Any] = {}
    for spec in dataflow.works:
        if spec.work.kind != "update" or spec.work.part == SHARED or (spec.work.part == METRICS and not metrics):
            continue
        for name in spec.writes:
            ref = dataflow.by_name[name].ref
            assert ref is not None, f"{name} is of no value of the step"
            outputs[ref.number] = array(spec.work.stage, Buffer(replaces.get(name, name)))
    return outputs
