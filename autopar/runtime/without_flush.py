"""Common parts of pipelines without a flush and the pipeline that they run, here or on workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from autopar.errors import AutoparError
from autopar.lower.split_layers import SplitStep
from autopar.runtime.loaded import LoadedProgram, Shardings
from autopar.schedule import Buffer, Dataflow, Work
from autopar.schedule.memory import WorkerMemory
from autopar.schedule.stale import METRICS, SHARED, StaleFlow

#: What is under way is under keys of stages, but for arguments of calls that later updates read.
ARGUMENT = "argument/"

T = TypeVar("T")


class PipelineStep(LoadedProgram, Protocol):
    """A loaded pipeline whose lists, or orders, somebody else makes: in this process or on workers."""

    @property
    def entries(self) -> tuple[Any, ...]:
        """(shape, dtype, weak type) of each input."""
        ...

    @property
    def constants(self) -> tuple[Any, ...]:
        """Arrays that the function closes over, placed: its last inputs."""
        ...

    @property
    def split_step(self) -> SplitStep:
        """Inputs and outputs that are in pieces."""
        ...

    def inputs_of(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Inputs of the lowered step by index, of some leaves by index."""
        ...

    def join(self, number: int, parts: Sequence[Any]) -> Any:
        """A result of the function from its outputs of the lowered step."""
        ...

    def joined(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Results of the function from outputs of the lowered step by number."""
        ...


@dataclass(frozen=True, eq=False)
class OverAnother:
    """A loaded program that runs another one, whose inputs and outputs are its own.

    Args:
        under: the other one.
    """

    under: PipelineStep

    @property
    def here(self) -> bool:
        """Whether its devices are those of this process."""
        return self.under.here

    @property
    def program(self) -> Shardings:
        """Shardings of inputs and outputs."""
        return self.under.program

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of inputs whose buffers are given up: none, as versions of them are read later."""
        return ()

    @property
    def executable(self) -> Any:
        """Texts and memory of all programs."""
        return self.under.executable

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that it needs."""
        return self.under.footprint_bytes

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker, in the order of the schedule's table; empty where they are not known."""
        return self.under.worker_memory

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        return self.under.match(leaves)

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, each where the program has it first."""
        return self.under.place_all(leaves)

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them."""
        return self.under.shard_all(leaves)

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """See `autopar.runtime.loaded.LoadedProgram`."""
        return self.under.make(function, arguments, inputs)

    def timed(self, note: Callable[[Work, float], None]) -> Self:
        """This program, with every part waited for."""
        timed: Any = self.under.timed(note)  # of the same type
        return dataclasses.replace(self, under=timed)


def carry_key(worker: int, b: Buffer) -> str:
    """Key of a buffer that is under way between two calls."""
    return f"stage {worker}/{b}"


def lacking(key: str) -> AutoparError:
    """The error of a state that lacks something that is under way."""
    return AutoparError(
        f"the state lacks {key}, which is under way between two calls",
        cause="the state is of a step with another plan, or of another number of calls",
        remedy="drain it with the step that made it: step.drain(state)",
    )


def arguments_of_updates(flow: StaleFlow, split_step: SplitStep, constants: int) -> tuple[str, ...]:
    """Inputs of the lowered step that updates read and that are neither state nor constants.

    Args:
        flow: what the calls carry out.
        split_step: the step.
        constants: number of arrays that the function closes over, its last inputs.
    """
    names = [i.name for i in split_step.step.graph.inputs]
    closed = len(split_step.inputs) - constants
    constant = {names[at] for group in split_step.inputs[closed:] for at in group}
    state = {str(o.updates) for o in split_step.step.graph.outputs}
    read = {n for spec in flow.dataflow.works if spec.work.kind == "update" for n in spec.reads}
    refs = [flow.dataflow.by_name[n].ref for n in sorted(read)]
    named = [r.name for r in refs if r is not None and r.kind == "in"]
    return tuple(dict.fromkeys(n for n in named if n not in state and n not in constant))


def outputs_of_updates(
    dataflow: Dataflow, replaces: Mapping[str, str], array: Callable[[int, Buffer], T], *, metrics: bool = True
) -> dict[int, T]:
    """Outputs of the step by number: the newest state, and what else its updates return.

    Args:
        dataflow: works; the update has the parts of `autopar.schedule.stale`.
        replaces: by value that the update writes the input that it is the next of.
        array: what a stage has in a buffer.
        metrics: whether that is wanted which is no state.
    """
    outputs: dict[int, T] = {}
    for spec in dataflow.works:
        if spec.work.kind != "update" or spec.work.part == SHARED or (spec.work.part == METRICS and not metrics):
            continue
        for name in spec.writes:
            ref = dataflow.by_name[name].ref
            assert ref is not None, f"{name} is of no value of the step"
            outputs[ref.number] = array(spec.work.stage, Buffer(replaces.get(name, name)))
    return outputs
