"""Lists in two processes next to lists in one and to one program, in turns of the same minutes, and their parts alone.

    one process          lists walked in one process with two devices
    two processes        lists walked by each of two processes, of its own stage
    compute alone        the same two processes, lists and programs; what would be sent is there at once
    sends alone          what these two processes send each other in a step, and nothing else
    one program          one XLA program of two processes

Compute alone over one process is the machine: two processes share its cores. Sends alone is the transport. The rest of
two processes is the method: processes wait for each other, and where devices are CPUs for their own programs.

All processes are started once and compile first; then each takes a turn of some steps while the others wait, so that
other work on the machine slows all of them alike. Medians of turns; CPU seconds are of all processes of a way.
``python -m benchmarks.hosts MODEL WAY`` is one of the processes.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar._compat.dtypes import jax_dtype
from autopar.runtime.pipeline import PipelineProgram
from autopar.runtime.transport.permutes import ArrayMove
from autopar.schedule import Send
from benchmarks.report import Report, Row, Say
from benchmarks.together import processes_together
from examples import gpt, mlp

#: By name: module, preset, overrides, microbatches, steps a turn, turns.
MODELS: Mapping[str, tuple[Any, str, dict[str, Any], int, int, int]] = MappingProxyType(
    {
        "mlp, tiny": (mlp, "tiny", {}, 4, 5, 3),
        "gpt, tiny": (gpt, "tiny", {}, 4, 10, 9),
        "gpt, 4 layers of 256": (gpt, "small", {}, 4, 2, 5),
    }
)
#: Processes of each world, and what it can be told to do.
WORLDS: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "one process": (1, ("steps",)),
        "two processes": (2, ("steps", "compute", "sends")),
        "one program": (2, ("steps",)),
    }
)
MOST_RATIO = 1.25


def run(quick: bool, say: Say) -> Report:
    """The table; ``quick`` takes one tiny model."""
    rows = [row for model in ([*MODELS][:1] if quick else [*MODELS][1:]) for row in _of_model(model, say)]
    ratios = [row["times"] for row in rows if row["run"] == "two processes"]
    apart = max(row["loss_apart"] for row in rows)
    passed = apart < 1e-4 and (quick or max(ratios) <= MOST_RATIO)
    target = f"losses within 1e-4; a step in two processes at most {MOST_RATIO} of one"
    return Report("hosts", target, tuple(rows), passed, measured=("step_s", "cpu_s", "compile_cpu_s"))


def _of_model(model: str, say: Say) -> list[Row]:
    *_, turns = MODELS[model]
    measured: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        worlds = {}
        for name, (count, _) in WORLDS.items():
            say(f"hosts: {model}, {name} compiles")
            children = stack.enter_context(processes_together(__name__, (model, name), count, 2))
            worlds[name] = children, [_answer(child) for child in children]
        for turn in range(turns):
            say(f"hosts: {model}, turn {turn + 1} of {turns}")
            for name, (children, _) in worlds.items():
                for what in WORLDS[name][1]:
                    answers = _told(children, what)
                    kept = measured.setdefault(name if what == "steps" else f"{what} alone", [])
                    kept.append((max(a["step_s"] for a in answers), sum(a["cpu_s"] for a in answers)))
        ends = {name: _told(children, "end") for name, (children, _) in worlds.items()}
    base_s = statistics.median(s for s, _ in measured["one process"])
    loss = ends["one process"][0]["loss"]
    rows: list[Row] = []
    for name, times in measured.items():
        world = "two processes" if name.endswith(" alone") else name
        first = worlds[world][1]
        step_s = statistics.median(s for s, _ in times)
        rows.append(
            {
                "model": model,
                "run": name,
                "step_s": step_s,
                "times": step_s / base_s,
                "cpu_s": statistics.median(c for _, c in times),
                "device_bytes": first[0]["device_bytes"],
                "compile_cpu_s": max(a["compile_cpu_s"] for a in first),
                "loss_apart": abs(ends[world][0]["loss"] - loss),
            }
        )
    return rows


def _told(children: list[subprocess.Popen[str]], what: str) -> list[dict[str, Any]]:
    """What all processes of a world say when they have done something together."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{what}\n")
        child.stdin.flush()
    return [_answer(child) for child in children]


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"a process ended with {child.wait()}")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def sends_of(program: PipelineProgram) -> Callable[[], None]:
    """What starts the sends of a step, in their order, with zeros."""
    step = program.prepare(frozenset())
    programs = []
    for number in step.order.starts[program.process]:
        launch = step.order.launches[number]
        first = step.lists[launch.worker][launch.at[0]]
        if isinstance(first, Send) and step.exchanges[first.tag].program is not None:
            programs.append(step.exchanges[first.tag])
    given = [
        [_zeros(m, m.source) for m in e.program.moves] if e.sends else None for e in programs if e.program is not None
    ]
    types = {n: o.type for n, o in enumerate(program.split_step.step.graph.outputs)}
    results = {
        n: jax.device_put(jnp.zeros(types[n].shape, jax_dtype(types[n].dtype)), program.places.ends[n].sharding)
        for n in sorted(program.broadcast.numbers)
        if program.places.ends[n].sharding.addressable_devices
    }

    def start() -> None:
        for exchange, arrays in zip(programs, given, strict=True):
            assert exchange.program is not None, "a send inside one process is no program"
            jax.block_until_ready(exchange.program(arrays) or [])
        shared = program.broadcast.tell(results)
        jax.block_until_ready(list(shared.values()))

    return start


@dataclass(frozen=True, eq=False)
class Arrived:
    """In place of a program of two processes: what it would make lies here already."""

    arrays: list[Any] | None

    def start(self, arrays: Any) -> tuple[list[Any], list[Any] | None]:
        return [], None if self.arrays is None else list(map(jnp.copy, self.arrays))


@dataclass(frozen=True, eq=False)
class Silent:
    """Tells nobody the results."""

    mesh: Any

    def tell(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        return {}


def compute_of(program: PipelineProgram) -> PipelineProgram:
    """The program without what its processes send each other: zeros are there in its place."""
    step = program.prepare(frozenset())
    exchanges = dict(step.exchanges)
    for tag, e in step.exchanges.items():
        zeros = [_zeros(m, m.target) for m in e.program.moves] if e.program is not None and e.receives else None
        if e.program is not None:
            arrived: Any = Arrived(zeros)
            exchanges[tag] = dataclasses.replace(e, program=arrived)
    alone, silent = dataclasses.replace(step, exchanges=exchanges), Silent(program.broadcast.mesh)
    return dataclasses.replace(program, prepare=lambda batch: alone, broadcast=silent)  # type: ignore[arg-type]


def _zeros(move: ArrayMove, place: Any) -> Any:
    return jax.device_put(jnp.zeros(move.shape, jax_dtype(move.dtype)), place)


def main() -> None:
    """One process of one way: takes commands from its input and answers each by a line of JSON."""
    model, way = sys.argv[1:]
    autopar.initialize()
    module, preset, overrides, microbatches, count, _ = MODELS[model]
    fn, (state, batch) = module.build(preset, **overrides)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": microbatches, "schedule": "1f1b"}
    function = autopar.parallelize(fn, pipeline="one_program" if way == "one program" else "lists", **options)
    began_s = _cpu_s()
    compiled = function.compile(state, batch)
    compile_s = _cpu_s() - began_s
    for _ in range(2):
        state, metrics = compiled(state, batch)
    lists = compiled.local if isinstance(compiled.local, PipelineProgram) else None
    sends = None if lists is None else sends_of(lists)
    compute = None if lists is None else compute_of(lists)
    leaves = jax.tree.leaves((state, batch))
    loss = float(metrics["loss"])
    print(json.dumps({"device_bytes": compiled.local.footprint_bytes, "compile_cpu_s": compile_s}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        began_s, cpu_s = time.perf_counter(), _cpu_s()
        for _ in range(count):
            if line.strip() == "sends":
                assert sends is not None, "only lists have sends of their own"
                sends()
            elif line.strip() == "compute":
                assert compute is not None, "only lists are computed without sends"
                compute.run(compute.place_all(leaves), leaves)
            else:
                state, metrics = compiled(state, batch)
                loss = float(metrics["loss"])
        answer = {"step_s": (time.perf_counter() - began_s) / count, "cpu_s": (_cpu_s() - cpu_s) / count}
        print(json.dumps(answer), flush=True)
    print(json.dumps({"loss": loss}), flush=True)


if __name__ == "__main__":
    main()
