"""Pipelines without a flush: calls that leave microbatches under way, and the drain.

`StaleProgram` is the loaded step, wherever its stages are. `load_stale` makes the one of this process or of a world of
processes, which hands each window's lists to a `PipelineProgram`; `autopar.runtime.ray.without_flush.load_remote_stale`
makes that of workers, for which each window is a step of its own. What it shares with `autopar.runtime.ampnet` comes
first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import msgspec

from autopar._compat.dtypes import dtype_name, jax_dtype
from autopar._compat.world import world
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.hosts.arrays import empty
from autopar.runtime.hosts.callbacks import check_callbacks
from autopar.runtime.hosts.connections import compile_connected
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.loaded import LoadedProgram, Shardings
from autopar.runtime.pipeline import PipelineProgram, load_pipeline
from autopar.runtime.step_lists import LaidOut, StepLists
from autopar.schedule import NONE, Buffer, Dataflow, ValueSpec, Work
from autopar.schedule.memory import WorkerMemory
from autopar.schedule.without_flush.lists import METRICS, SHARED, StaleFlow, Window, Windows

#: What is under way is under keys of stages, but for arguments of calls that later updates read.
ARGUMENT = "argument/"

T = TypeVar("T")
#: (the pipeline, inputs of the lowered step by name, what is under way, calls so far, whether it is a drain) -> outputs
#: of the lowered step by number, and what is under way after it.
Carry: TypeAlias = Callable[
    [Any, Mapping[str, Any], Mapping[str, Any], int, bool], tuple[dict[int, Any], dict[str, Any]]
]


class PipelineStep(LoadedProgram, Protocol):
    """A loaded pipeline whose lists, or orders, somebody else makes: in this process or on workers."""

    @property
    def entries(self) -> tuple[Any, ...]:
        """(shape, dtype, weak type) of each input."""

    @property
    def constants(self) -> tuple[Any, ...]:
        """Arrays that the function closes over, placed: its last inputs."""

    @property
    def split_step(self) -> SplitStep:
        """Inputs and outputs that are in pieces."""

    def inputs_of(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Inputs of the lowered step by index, of some leaves by index."""

    def join(self, number: int, parts: Sequence[Any]) -> Any:
        """A result of the function from its outputs of the lowered step."""

    def joined(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Results of the function from outputs of the lowered step by number."""


@dataclass(frozen=True, eq=False)
class OverAnother:
    """A loaded program that runs another one, whose inputs and outputs are its own.

    Args:
        under: the other one.
    """

    under: PipelineStep
    donated = ()

    @property
    def here(self) -> bool:
        """Whether its devices are those of this process."""
        return self.under.here

    @property
    def program(self) -> Shardings:
        """Shardings of inputs and outputs."""
        return self.under.program

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
        """Results of ``function`` on ``arguments``, made where the step reads the ``inputs`` of these numbers."""
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
    """Outputs of an asynchronous pipeline's step by index: the newest state, and metrics that its updates return.

    Args:
        dataflow: the stages' programs and the values that they read and write.
        replaces: by name of a new state value the input that it is the next version of.
        array: the array of a stage's buffer.
        metrics: whether results that are no state are wanted.
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


@dataclass(frozen=True, eq=False)
class StaleProgram(OverAnother):
    """A pipeline without a flush, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        windows: instruction lists of all calls.
        carry_out: runs a window.
        most_bytes: bytes a device of the worker that needs most; None where ``under`` knows them.
    """

    windows: Windows
    carry_out: Carry
    most_bytes: int | None = None

    @property
    def entries(self) -> Sequence[Any]:
        """(shape, dtype, weak type) of each input."""
        return self.under.entries

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device of the worker that needs most."""
        return self.under.footprint_bytes if self.most_bytes is None else self.most_bytes

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """None: every call says what is under way."""
        return None

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Refuses: what is under way would be lost. See `call`."""
        raise AutoparError(
            f"a step with schedule {self.windows.flow.versions.name} is called by the decorated function",
            remedy="step(state, batch), and step.drain(state) at the end",
        )

    def call(self, placed: Sequence[Any], carry: Mapping[str, Any], calls: int) -> tuple[list[Any], dict[str, Any]]:
        """Runs a call.

        Args:
            placed: inputs as `place_all` made them.
            carry: what the calls before left under way; empty before the first.
            calls: their number.

        Returns:
            The results of the function, and what is under way now.
        """
        under = self.under
        inputs = self._named(dict(enumerate([*placed, *under.constants])))
        outputs, left = self.carry_out(under, inputs, carry if calls else {}, calls, False)
        arguments = arguments_of_updates(self.windows.flow, under.split_step, len(under.constants))
        return under.joined(outputs), left | {ARGUMENT + n: inputs[n] for n in arguments}

    def drain(self, leaves: Sequence[Any], carry: Mapping[str, Any], calls: int) -> dict[int, Any]:
        """Runs what is under way to its end.

        Args:
            leaves: of the state, the first inputs of the function.
            carry: what is under way.
            calls: number of calls so far, at least one.

        Returns:
            New leaves by number of the function's output.
        """
        under = self.under
        constants = enumerate(under.constants, len(under.split_step.inputs) - len(under.constants))
        inputs = self._named(dict(enumerate(under.place_all(leaves))) | dict(constants))
        inputs |= {k.removeprefix(ARGUMENT): a for k, a in carry.items() if k.startswith(ARGUMENT)}
        outputs, _ = self.carry_out(under, inputs, carry, calls, True)
        whole = {n: at for n, at in enumerate(under.split_step.outputs) if all(i in outputs for i in at)}
        return {n: under.join(n, [outputs[i] for i in at]) for n, at in whole.items()}

    def _named(self, leaves: Mapping[int, Any]) -> dict[str, Any]:
        names = [i.name for i in self.under.split_step.step.graph.inputs]
        return {names[i]: array for i, array in self.under.inputs_of(leaves).items()}


@dataclass(frozen=True, eq=False)
class _OnLists:
    """Windows of a pipeline on the devices of this process or of a world.

    Args:
        windows: instruction lists of all calls.
        prepared: lists of calls by what they depend on.
    """

    windows: Windows
    prepared: dict[Any, StepLists] = field(default_factory=dict)

    def __call__(
        self, pipeline: PipelineProgram, inputs: Mapping[str, Any], carry: Mapping[str, Any], calls: int, drain: bool
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """See `Carry`."""
        flow, window = self.windows.flow, (self.windows.drain if drain else self.windows.call)(calls)
        batch = pipeline.placed_batch(inputs) if any(window.batch) else set()

        def given(value: ValueSpec) -> bool:
            if value.ref is not None and value.ref.kind == "in":
                return not (carry and flow.is_carried(Buffer(value.name)))
            return any(window.batch)

        start = pipeline.start(inputs, batch, given, flow.lag)
        lie: dict[tuple[int, Buffer], LaidOut] = {}
        names = pipeline.split_step.step.graph.inputs
        origins = {x.name: origin for x, origin in zip(names, pipeline.places.origins, strict=True)}
        copies = pipeline.maker.copies(origins, batch, lie, given, flow.lag)
        if carry:
            _add_carried(pipeline, window, carry, start, lie)
        places = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b), metrics=not drain)
        ends = {n: pipeline.places.ends[n] for n in places}
        results = [
            (stage, b, ends[n], Buffer(f"output/{n}")) for n, (stage, b) in sorted(places.items())
            if ends[n].worker != stage
        ]  # fmt: skip
        key = id(window), drain, bool(carry), frozenset(batch), _layouts(pipeline, window, lie)
        if key not in self.prepared:
            lists = [w.instructions for w in window.workers]
            self.prepared[key] = pipeline.maker.extended(lists, copies, results, lie)
            compile_connected(pipeline.maker.programs)
        step = self.prepared[key]
        with LAUNCHES:
            workers = pipeline.carry_out(step, start)
        buffers = {n: b if ends[n].worker == s else Buffer(f"output/{n}") for n, (s, b) in places.items()}
        outputs = {n: pipeline.output(workers, n, ends[n], b) for n, b in buffers.items()}
        left = {}
        for w, b in window.left(flow):
            laid = step.arrays.get((w, b)) or pipeline.maker.port_array(w, b.value)  # as its first reader takes it
            there = (
                empty(laid.shape, laid.sharding, jax_dtype(laid.dtype)) if w not in workers else workers[w].arrays[b]
            )
            left[carry_key(w, flow.shifted(b))] = there
        if not drain:
            with LAUNCHES:
                outputs.update(pipeline.broadcast.tell(outputs))
        check_callbacks(pipeline.lowered.callbacks, (outputs, left))
        return outputs, left


def _layouts(
    pipeline: PipelineProgram, window: Window, lie: Mapping[tuple[int, Buffer], LaidOut]
) -> tuple[LaidOut, ...]:
    """Layouts that the window does not say: of what is carried and no program reads."""
    carried = ((w, b) for w, buffers in enumerate(window.starts) for b in sorted(buffers))
    return tuple(lie[w, b] for w, b in carried if (w, b.value) not in pipeline.maker.ports and (w, b) in lie)


def _add_carried(
    pipeline: PipelineProgram,
    window: Window,
    carry: Mapping[str, Any],
    start: dict[tuple[int, Buffer], Any],
    lie: dict[tuple[int, Buffer], LaidOut],
) -> None:
    """Adds what the call before left under way."""
    for worker, buffers in enumerate(window.starts):
        for b in sorted(buffers):
            key = carry_key(worker, b)
            if key not in carry:
                raise lacking(key)
            array = carry[key]
            known = pipeline.maker.ports.get((worker, b.value))
            place = array.sharding if known is None else known[0].sharding(known[1])
            lie[worker, b] = LaidOut(array.shape, dtype_name(array.dtype), place)
            if worker in pipeline.workers_here:
                # Totals are written over, and a state may be used twice.
                safe = array if b.origin == NONE else jnp.copy(array)
                start[worker, b] = safe if safe.sharding == place else jax.device_put(safe, place)


def load_stale(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    windows: Windows,
    devices: Sequence[Any],
    *,
    by_hand: bool = True,
) -> StaleProgram:
    """Compiles a pipeline without a flush for all processes; other arguments and errors as of `load_pipeline`.

    Args:
        windows: instruction lists of all calls.
    """
    everything = frozenset(v.name for v in windows.flow.dataflow.values)  # what is under way belongs to the caller
    pipeline = load_pipeline(traced, split_step, lowered, devices, spared=everything, by_hand=by_hand, flushes=False)
    most = max((_worker_bytes(pipeline, windows, w) for w in pipeline.workers_here), default=0)
    processes = world()
    if processes is not None:
        turn = Agreement.next(processes, f"the lists of {traced.graph.name}")
        turn.compare([])
        most = max(msgspec.json.decode(raw, type=int) for raw in turn.gather(msgspec.json.encode(most)))
    return StaleProgram(pipeline, windows, _OnLists(windows), most)


def _worker_bytes(pipeline: PipelineProgram, windows: Windows, stage: int) -> int:
    """Bytes a device of a worker: its buffers, one of each version, and what programs need."""
    flow, window = windows.flow, windows.calls[-1]
    sizes = {v.name: v.bytes for v in flow.dataflow.values}
    lasting = sum(
        v.bytes for v in flow.dataflow.values if v.is_input and stage in v.stages and v.lifetime != "microbatch"
    )
    buffers = sum(sizes[b.value] for b in (*window.starts[stage], *window.batch[stage]))
    temporary = 0
    for (worker, _), loaded in pipeline.loaded.items():
        if worker == stage and loaded.compiled is not None:
            m = loaded.compiled.memory_analysis()
            temporary = max(temporary, int(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes))
    return lasting + buffers + temporary
