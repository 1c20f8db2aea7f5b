"""A pipeline without a flush on workers: each call is a step of lists of its own, of the same programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.frontend import Traced
from autopar.lower.pipeline.stale import StalePipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.program import RemoteProgram, deployment_of, joined_parts, load_program
from autopar.runtime.ray.windows import WindowSource, WindowSources
from autopar.runtime.without_flush import ARGUMENT, CarriedCalls, OverAnother, arguments_of_updates, lacking
from autopar.schedule import Work
from autopar.schedule.memory import WorkerMemory


@dataclass(frozen=True, eq=False)
class _Window:
    """A call or a drain that is loaded on the workers."""

    content: WindowSource
    pipeline: RemotePipeline

    def run(self, inputs: Mapping[int, Any], carry: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Outputs by number and what is under way, from inputs of the lowered step and what was under way."""
        for key in self.content.carried:
            if key not in carry:
                raise lacking(key)
        values = [*(inputs[n] for n in self.content.reads), *(carry[key] for key in self.content.carried)]
        results = self.pipeline.step(values)
        count = len(self.content.outputs)
        outputs = dict(zip(self.content.outputs, results, strict=False))
        return outputs, dict(zip(self.content.left, results[count:], strict=True))


@dataclass(frozen=True, eq=False)
class RemoteStaleProgram(OverAnother, CarriedCalls):
    """A pipeline without a flush whose workers are ready; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        first: the first call, which puts and makes the arrays of all.
        stale: the lists.
        load: loads the lists of a call or a drain.
        windows: those that are loaded, by whether they are drains, and number.
    """

    first: RemoteProgram
    stale: StalePipeline
    load: Callable[[bool, int], _Window]
    windows: dict[tuple[bool, int], _Window] = field(default_factory=dict)

    @property
    def under(self) -> LoadedProgram:
        """See `OverAnother.under`."""
        return self.first

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """None: it is not known here."""
        return ()

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the program with the largest arguments, results and temporaries needs."""
        return self.first.footprint_bytes

    @property
    def entries(self) -> Sequence[Any]:
        """(shape, dtype, weak type) of each input."""
        return self.first.entries

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """None: every call says what is under way."""
        return None

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Refuses: what is under way would be lost. See `call`."""
        raise self.refused(self.stale.windows.flow.versions.name)

    def timed(self, note: Callable[[Work, float], None]) -> RemoteStaleProgram:
        """This program: workers keep the seconds of their instructions themselves."""
        return self

    def call(self, placed: Sequence[Any], carry: Mapping[str, Any], calls: int) -> tuple[list[Any], dict[str, Any]]:
        """See `CarriedCalls.call`; results and what is under way are handles."""
        inputs = dict(enumerate(self.first.inputs(placed)))
        window = self._window(False, min(calls, len(self.stale.windows.calls) - 1))
        outputs, left = window.run(inputs, carry)
        index = {i.name: n for n, i in enumerate(self.first.split_step.step.graph.inputs)}
        left |= {ARGUMENT + n: inputs[index[n]] for n in self._arguments()}
        return self.first.joined([outputs[n] for n in range(len(outputs))]), left

    def drain(self, leaves: Sequence[Any], carry: Mapping[str, Any], calls: int) -> dict[int, Any]:
        """See `CarriedCalls.drain`."""
        first = self.first
        index = {i.name: n for n, i in enumerate(first.split_step.step.graph.inputs)}
        inputs = first.inputs_of(dict(enumerate(first.place_all(leaves))) | first.constants_by_index)
        inputs |= {index[k.removeprefix(ARGUMENT)]: a for k, a in carry.items() if k.startswith(ARGUMENT)}
        outputs, _ = self._window(True, min(calls, len(self.stale.windows.drains))).run(inputs, carry)
        whole = {n: at for n, at in enumerate(first.split_step.outputs) if all(i in outputs for i in at)}
        return {n: joined_parts([outputs[i] for i in at]) for n, at in whole.items()}

    def _arguments(self) -> tuple[str, ...]:
        return arguments_of_updates(self.stale.windows.flow, self.first.split_step, len(self.first.constants))

    def _window(self, drain: bool, number: int) -> _Window:
        if (drain, number) not in self.windows:
            self.windows[drain, number] = self.load(drain, number)
        return self.windows[drain, number]


def load_remote_stale(
    traced: Traced,
    split_step: SplitStep,
    stale: StalePipeline,
    cluster: RayCluster,
    progress: Callable[[str], None] | None = None,
) -> RemoteStaleProgram:
    """Starts workers for a pipeline without a flush and compiles it there; other calls are compiled when they come.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        stale: its pipeline.
        cluster: where the workers are.
        progress: called with what is being done.

    Raises:
        ClusterError: the cluster has not as many devices as the plan wants, or workers do not start.
    """
    lowered = stale.pipeline
    axes = tuple(lowered.mesh_axes(s) for s in range(lowered.plan.num_stages))
    sources = WindowSources(stale, split_step.step.graph.inputs, axes)

    def loaded(content: WindowSource) -> _Window:
        runtime = RemotePipeline(cluster.workers, deployment_of(content.source, lowered, cluster), progress)
        runtime.load()
        return _Window(content, runtime)

    def load(drain: bool, number: int) -> _Window:
        return loaded(sources.drain(number) if drain else sources.call(number))

    first = loaded(sources.call(0))
    program = load_program(traced, split_step, first.pipeline, ())
    return RemoteStaleProgram(program, stale, load, {(False, 0): first})
