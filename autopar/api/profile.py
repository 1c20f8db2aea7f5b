"""`profile`: a measured step and the prediction of its plan, by kind of operator."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar._compat.files import write_whole
from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize
from autopar.cost.collectives import KINDS
from autopar.errors import AutoparError
from autopar.lower.hlo import operations
from autopar.plan import Plan
from autopar.plan.columns import table
from autopar.plan.details import TimelineSlice
from autopar.plan.text import seconds_text
from autopar.simulate.chrome import stage_trace


@dataclass(frozen=True)
class ProfileRow:
    """A kind of operator.

    Args:
        kind: a primitive, or a kind of collective.
        predicted_s: seconds a step of the plan, on one device.
        measured_s: seconds a step and device of the run; a fusion counts as the operator that it ends with.
        count: events a step and device.
    """

    kind: str
    predicted_s: float
    measured_s: float
    count: float


@dataclass(frozen=True)
class Profile:
    """The result of `profile`; prints as a table.

    Args:
        plan: the plan, with its predicted times.
        step_s: measured seconds a step, from call to results.
        rows: kinds of operators, those that took longest first.
        slices: events of one device in the measured steps; times are seconds since the first event.
    """

    plan: Plan
    step_s: float
    rows: tuple[ProfileRow, ...]
    slices: tuple[TimelineSlice, ...]

    def __str__(self) -> str:
        shown = [(r.kind, seconds_text(r.predicted_s), seconds_text(r.measured_s), f"{r.count:g}") for r in self.rows]
        head = f"step: {seconds_text(self.plan.step_time)} predicted, {seconds_text(self.step_s)} measured"
        return head + "\n" + table(("kind", "predicted", "measured", "events"), shown)

    def save(self, path: str) -> None:
        """Writes a Chrome trace, which Perfetto opens: the predicted step and what one device did."""
        predicted = self.plan.details
        write_whole(
            path,
            stage_trace({"predicted": (predicted.slices, predicted.memory), "measured": (self.slices, ())}),
        )


def profile(step: Any, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
    """Runs a step under jax's profiler and compares what it took with the plan's prediction.

    Args:
        step: a decorated function; a plain one is parallelized over the devices of this process.
        args: its arguments. Donated ones are copied, so they can be used afterwards.
        steps: how many steps are measured, after one that is not.
        kwargs: further arguments of ``step``.

    Raises:
        AutoparError: the plan has several stages, which `Timeline.measured` shows, or nothing was recorded.
    """
    function = step if isinstance(step, ParallelFunction) else parallelize(step)
    compiled = function.compile(*args, **kwargs)
    if compiled.plan.num_stages > 1:
        raise AutoparError(
            f"the plan has {compiled.plan.num_stages} stages; profile shows the operators of one",
            remedy="num_stages=1, or autopar.simulate(plan) for the pipeline",
        )
    jax.block_until_ready(function(*_copied(args), **_copied(kwargs)))
    given = [(_copied(args), _copied(kwargs)) for _ in range(steps)]
    jax.block_until_ready(given)
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            for some, named in given:
                jax.block_until_ready(function(*some, **named))
            seconds = (time.perf_counter() - start) / steps
        files = sorted(Path(folder).rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"] if files else []
    measured = _of_programs(events)
    if not measured:
        raise AutoparError("jax's profiler recorded no operator", cause="the backend writes no events of operators")
    kinds = {name: _kind(opcode, scope) for name, (opcode, scope) in operations(compiled.as_text()).items()}
    slices = _slices(measured, kinds)
    return Profile(compiled.plan, seconds, _rows(compiled.plan, measured, kinds, steps), slices)


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) else a, tree)


def _of_programs(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Events of operators of compiled programs."""
    return [e for e in events if e.get("ph") == "X" and "hlo_op" in e.get("args", {})]


def _device(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["args"].get("device_ordinal", "")


def _kind(opcode: str, scope: str) -> str:
    """A kind of collective, or the primitive at the end of jax's name stack."""
    collective = opcode.removesuffix("-start").removesuffix("-done")
    if collective in KINDS:
        return collective
    return scope.rpartition("/")[2] or opcode


def _rows(
    plan: Plan, measured: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], steps: int
) -> tuple[ProfileRow, ...]:
    devices = len({_device(e) for e in measured})
    took: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for e in measured:
        kind = kinds.get(e["args"]["hlo_op"], "other")
        took[kind] += e["dur"] * 1e-6
        count[kind] += 1
    predicted: dict[str, float] = defaultdict(float)
    for s in plan.details.slices:
        name = (
            s.name.partition(" over ")[0] if s.resource != "compute" else s.name.rpartition("/")[2].rpartition(".")[0]
        )
        if name not in ("scan", "while", "cond"):  # what is inside counts
            predicted[name] += s.end_s - s.start_s
    each = devices * steps
    rows = [ProfileRow(k, predicted[k], took[k] / each, count[k] / each) for k in {**predicted, **took}]
    return tuple(sorted(rows, key=lambda r: (-r.measured_s, -r.predicted_s, r.kind)))


def _slices(measured: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> tuple[TimelineSlice, ...]:
    """The events of the first device."""
    first = min(map(_device, measured), key=str)
    of_first = sorted((e for e in measured if _device(e) == first), key=lambda e: float(e["ts"]))
    zero = float(of_first[0]["ts"])
    return tuple(
        TimelineSlice(
            f"{kinds.get(e['args']['hlo_op'], 'other')}: {e['name']}",
            "intra" if kinds.get(e["args"]["hlo_op"]) in KINDS else "compute",
            (float(e["ts"]) - zero) * 1e-6,
            (float(e["ts"]) + float(e["dur"]) - zero) * 1e-6,
        )
        for e in of_first
    )
