"""`measure`: steps that ran, laid next to what their plan predicted."""

from __future__ import annotations

import html
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from autopar.api.compiled import Compiled
from autopar.api.mutable import split_mutable
from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.plan.columns import table
from autopar.plan.text import bytes_text, seconds_text
from autopar.runtime.hosts.arrays import copied
from autopar.runtime.loaded import LoadedProgram
from autopar.schedule import Work

_HEADER = ("", "predicted", "measured", "predicted/measured")


@dataclass(frozen=True)
class MeasuredRow:
    """One figure.

    Args:
        name: what it is of.
        predicted: seconds or bytes a device that the plan says.
        measured: likewise, of the steps that ran.
        unit: of both.
    """

    name: str
    predicted: float
    measured: float
    unit: Literal["seconds", "bytes"] = "bytes"

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None where nothing was measured."""
        return self.predicted / self.measured if self.measured else None


@dataclass(frozen=True)
class Measured:
    """The result of `measure`; prints as a table.

    Args:
        program: name of the function.
        plan: what ran.
        seconds: of each step.
        memory: bytes a device by kind: those of arguments as they lie, the rest as the compiler has it. Of a plan with
            several stages by worker: what its list of instructions needs with the compiled programs.
        stages: busy seconds of each stage in a step, where there are several: medians of its programs, each run alone.
    """

    program: str
    plan: Plan
    seconds: tuple[float, ...]
    memory: tuple[MeasuredRow, ...]
    stages: tuple[MeasuredRow, ...] = ()

    @property
    def step_time(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def rows(self) -> tuple[MeasuredRow, ...]:
        """Step time, that of stages where there are several, then memory by kind or worker, then its peak."""
        return (MeasuredRow("step time", self.plan.step_time, self.step_time, "seconds"), *self.stages, *self.memory)

    def table(self) -> str:
        """The rows as aligned text."""
        return table(_HEADER, self._texts())

    def __str__(self) -> str:
        return f"{self._title()}\n{self.table()}"

    def _repr_html_(self) -> str:
        lines = [_HEADER, *self._texts()]
        body = "".join(
            "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in line) + "</tr>"
            for tag, line in zip(["th"] + ["td"] * (len(lines) - 1), lines, strict=True)
        )
        return f"<p>{html.escape(self._title())}</p><table>{body}</table>"

    def _title(self) -> str:
        meshes = ["x".join(str(n) for _, n in s.mesh_axes) for s in self.plan.stages]
        where = f"a mesh of {meshes[0]}" if len(meshes) == 1 else f"{len(meshes)} stages of {', '.join(meshes)}"
        fastest, slowest = seconds_text(min(self.seconds)), seconds_text(max(self.seconds))
        return f"{self.program} on {where}: {len(self.seconds)} steps of {fastest} to {slowest}"

    def _texts(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for r in self.rows:
            text = seconds_text if r.unit == "seconds" else bytes_text
            ratio = "-" if r.ratio is None else f"{r.ratio:.3f}"
            rows.append((r.name, text(r.predicted), text(r.measured), ratio))
        return rows


def measure(step: Callable[..., Any], *args: Any, repeats: int = 5, **kwargs: Any) -> Measured:
    """Runs a step several times and lays it next to its prediction.

    Args:
        step: a decorated function; a plain one is parallelized for the devices of this process.
        args: its arguments, as arrays. They are left as they are: what the step donates are copies.
        repeats: timed steps, after one that is not timed.
        kwargs: further arguments of the function.

    Raises:
        AutoparError: ``repeats`` is no positive number, or the function cannot be planned or run.
    """
    if repeats < 1:
        raise AutoparError(f"repeats={repeats} is not a number of steps", remedy="give 1 or more")
    function = step if isinstance(step, ParallelFunction) else parallelize(step)
    compiled = function.compile(*args, **kwargs)
    plain_args, plain_kwargs, _ = split_mutable(args, kwargs)
    leaves = compiled.leaves_of(plain_args, plain_kwargs)
    seconds = [_once(compiled, leaves) for _ in range(repeats + 1)][1:]
    name, local = compiled.traced.graph.name, compiled.local
    if local.worker_memory:
        stages = _stage_rows(compiled.plan, local, leaves, repeats)
        return Measured(name, compiled.plan, tuple(seconds), _worker_rows(compiled.plan, local), stages)
    return Measured(name, compiled.plan, tuple(seconds), _memory(compiled, leaves))


def _once(compiled: Compiled, leaves: list[Any]) -> float:
    """Seconds of a step on arguments that lie as the plan wants them; its results are dropped."""
    local = compiled.local
    placed = local.place_all(leaves)
    for i in local.donated:
        placed[i] = copied(placed[i])
    jax.block_until_ready(placed)
    start = time.perf_counter()
    jax.block_until_ready(local.run(placed, placed))
    return time.perf_counter() - start


def _memory(compiled: Compiled, leaves: list[Any]) -> tuple[MeasuredRow, ...]:
    plan, local = compiled.plan, compiled.local
    peak = MeasuredRow("peak memory", plan.peak_memory, local.footprint_bytes)
    if plan.num_stages > 1:
        return (peak,)  # stages in one program: what is whose cannot be told apart
    (stage,) = plan.stages
    device_bytes: dict[str, int] = {"parameter": 0, "optimizer": 0, "batch": 0}
    for record, array in zip(plan.content.inputs, local.place_all(leaves), strict=False):
        if record.role in device_bytes and record.memory == "device":
            device_bytes[record.role] += array.addressable_shards[0].data.nbytes
    said = stage.memory
    rest = said.gradients + said.activations + said.temporaries
    return (
        MeasuredRow("parameters", said.parameters, device_bytes["parameter"]),
        MeasuredRow("optimizer", said.optimizer, device_bytes["optimizer"]),
        MeasuredRow("batch", said.batch, device_bytes["batch"]),
        MeasuredRow("everything else", rest, local.footprint_bytes - sum(device_bytes.values())),
        peak,
    )


def _stage_rows(plan: Plan, local: LoadedProgram, leaves: list[Any], repeats: int) -> tuple[MeasuredRow, ...]:
    """Busy seconds of each stage: of steps in which every program is waited for, the median."""
    steps: list[dict[int, float]] = []
    for _ in range(repeats):
        spent: dict[int, float] = defaultdict(float)

        def note(work: Work, seconds: float, spent: dict[int, float] = spent) -> None:
            spent[work.stage] += seconds

        jax.block_until_ready(local.timed(note).run(local.place_all(leaves), ()))
        steps.append(spent)
    return tuple(
        MeasuredRow(f"stage {s}, busy", stage.step_time, statistics.median(step[s] for step in steps), "seconds")
        for s, stage in enumerate(plan.stages)
    )


def _worker_rows(plan: Plan, local: LoadedProgram) -> tuple[MeasuredRow, ...]:
    rows = []
    for m in local.worker_memory:
        name = f"worker {m.worker}, stage{'s' if len(m.stages) > 1 else ''} {', '.join(map(str, m.stages))}"
        rows.append(MeasuredRow(name, max(plan.stages[s].memory.total for s in m.stages), m.total))
    return (*rows, MeasuredRow("peak memory", plan.peak_memory, max(r.measured for r in rows)))
