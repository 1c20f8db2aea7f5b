"""Drawn lists carried out by processes: each value arrives as it was made, and all processes come to an end.

Schedule, stages, workers, the processes of each worker, its mesh and its layout are drawn; programs are sums with a
number of their own, so that nothing of a model is compiled. ``python -m tests.runtime_hosts.drawn_lists --cases 200
--processes 3`` starts the processes once and carries all cases out in them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import click
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir import Layout, TensorType
from autopar.lower.pipeline.stage_program import Port
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.step_lists import ListMaker, StepLists
from autopar.runtime.transport.permutes import InFlight, MovePrograms, PermuteLinks
from autopar.schedule import (
    Accumulate,
    Apply,
    Buffer,
    Dataflow,
    Free,
    Instruction,
    Recv,
    Run,
    Send,
    Stash,
    Table,
    ValueRef,
    Work,
)
from tests.runtime_hosts.launch import results, run
from tests.schedule.test_order import drawn

SIZE = 8
_JOINS: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def number_of(*names: Any) -> int:
    """A small number of some names."""
    return zlib.crc32(repr(names).encode()) % 1009


def first_value(buffer: Buffer) -> Any:
    """The array of an input."""
    return (np.arange(SIZE) + number_of(buffer.value, buffer.microbatch)).astype(np.int32)


def made(work: Work, microbatch: int, arrays: Sequence[Any], count: int) -> list[Any]:
    """What a program makes: numbers that tell which one it was and what it was given, in which order."""
    base = sum(((n + 3) * a.sum(0) if a.ndim > 1 else (n + 3) * a) % 997 for n, a in enumerate(arrays))
    salt = number_of(work.kind, work.stage, work.part)
    return [(base + salt * (n + 1) + 7 * microbatch) % 997 for n in range(count)]


def expected(
    lists: Sequence[Sequence[Instruction]], there: Sequence[set[Buffer]], step: StepLists
) -> list[dict[Buffer, Any]]:
    """By worker the arrays that are left, and by ``Buffer("tag", n)`` what arrived, carried out by one and numpy."""
    held: list[dict[Buffer, Any]] = [{b: first_value(b) for b in some} for some in there]
    came: list[dict[Buffer, Any]] = [{} for _ in lists]
    rows: dict[tuple[int, Buffer], dict[int, Any]] = {}
    sent: dict[int, Any] = {}

    def do(worker: int, i: Instruction) -> None:
        arrays = held[worker]
        match i:
            case Run() | Apply():
                number = max(0, i.microbatch) if isinstance(i, Run) else 0
                outputs = made(i.work, number, [arrays[b] for b in i.reads], len(i.writes))
                for b in i.donate:
                    del arrays[b]
                arrays.update(zip(i.writes, outputs, strict=True))
            case Accumulate():
                if i.reduce == "concatenate":
                    rows.setdefault((worker, i.into), {})[i.value.microbatch] = arrays[i.value]
                    kept = rows[worker, i.into]
                    arrays[i.into] = np.stack([kept[k] for k in sorted(kept)])
                else:
                    term = arrays[i.value]
                    arrays[i.into] = term if i.first else _JOINS[i.reduce](arrays[i.into], term)
                if i.donate:
                    del arrays[i.value]
            case Send():
                sent[i.tag] = arrays[i.value]
            case Recv():
                arrays[i.value] = came[worker][Buffer("tag", i.tag)] = sent.pop(i.tag)
            case Stash():
                arrays[i.target] = arrays[i.source]
            case Free():
                for b in i.values:
                    del arrays[b]
            case _:
                raise AssertionError(f"{i} is none of these lists'")

    for launch in step.order.launches:
        for worker, positions in ((launch.worker, launch.at), (launch.target, launch.target_at)):
            for at in positions:
                do(worker, lists[worker][at])
    return [{**arrays, **arrived} for arrays, arrived in zip(held, came, strict=True)]


def meshes_of(processes: Sequence[frozenset[int]], draw: random.Random) -> list[Mesh]:
    """By worker a mesh of a run of devices of each of its processes."""
    by_process: dict[int, list[Any]] = {}
    for d in jax.devices():
        by_process.setdefault(d.process_index, []).append(d)
    meshes = []
    for some in processes:
        most = len(by_process[0])
        each = draw.choice([n for n in (1, 2, 4) if n * len(some) <= SIZE and n <= most])
        at = draw.randrange(0, min(most, 2 * each), each)
        devices = [d for p in sorted(some) for d in by_process[p][at : at + each]]
        meshes.append(Mesh(np.array(devices, dtype=object), ("x",)))
    return meshes


def summed(work: Work, count: int) -> Callable[..., Any]:
    """A program that makes so many arrays of what it is given, device by device."""

    def function(number: Any, *arrays: Any) -> list[Any]:
        shards = [
            made(work, int(number), [np.asarray(x) for x in each], count)
            for each in zip(*map(_data, arrays), strict=True)
        ]
        one = arrays[0]
        devices = [s.device for s in one.addressable_shards]
        return [
            jax.make_array_from_single_device_arrays(
                (SIZE,), one.sharding, [jax.device_put(s[n], d) for s, d in zip(shards, devices, strict=True)]
            )
            for n in range(count)
        ]

    return function


def _data(array: Any) -> list[Any]:
    return [s.data for s in array.addressable_shards]


def ready_programs(line: Sequence[Instruction], place: NamedSharding) -> dict[Work, Ready]:
    """The programs of a worker, as its list calls them."""
    programs = {}
    for i in line:
        if isinstance(i, Run | Apply):
            names = tuple(b.value for b in i.reads)
            programs[i.work] = Ready(names, (place,) * len(names), summed(i.work, len(i.writes)))
    return programs


class _Kept(PermuteLinks):
    """Connections that keep what arrived."""

    def __init__(self, step: StepLists, in_flight: InFlight) -> None:
        super().__init__(step.exchanges, in_flight)
        self.arrived: dict[int, Any] = {}

    def receive(self, tag: int, sharding: NamedSharding | None) -> Any:
        self.arrived[tag] = super().receive(tag, sharding)
        return self.arrived[tag]


def same_here(array: Any, want: Any) -> bool:
    """Whether what this process has of an array is what is wanted."""
    return all(np.array_equal(s.data, want[s.index]) for s in array.addressable_shards)


def case(seed: int, process: int, count: int, moves: MovePrograms) -> dict[str, Any] | None:
    """Carries out a drawn case; None where there is none of that number."""
    found = drawn(seed, count)
    if found is None:
        return None
    name, lists, there, processes, _ = found
    draw = random.Random(seed)
    meshes = meshes_of(processes, draw)
    ports, places = {}, []
    for worker, line in enumerate(lists):
        layout = Layout((("x",) if draw.choice([True, False]) else (),))
        for value in sorted({b.value for i in line for b in buffers_of(i)} | {b.value for b in there[worker]}):
            ports[worker, value] = Port(ValueRef("in", value, 0), TensorType((SIZE,), "i32"), layout), meshes[worker]
        places.append(NamedSharding(meshes[worker], PartitionSpec(*layout.dims)))
    maker = ListMaker(
        Dataflow((), ()), Table(name, 1, 1, ((),)), {}, {(w, 0): m for w, m in enumerate(meshes)}, ports,
        tuple(processes), process, count, {}, moves, draw.choice([True, False]),
    )  # fmt: skip
    step = maker.ordered(tuple(lists), {}, {})
    moves.compile()
    in_flight = InFlight(Mesh(np.array(jax.devices(), dtype=object), ("all",)))
    links = _Kept(step, in_flight)
    workers = {}
    for worker, mesh in enumerate(meshes):
        if mesh.local_devices:
            start = {b: _placed(first_value(b), places[worker]) for b in sorted(there[worker])}
            programs = ready_programs(lists[worker], places[worker])
            received = {b.value: places[worker] for b in start}
            workers[worker] = Worker(programs, received, links.link(worker), start)
    spread_out = {w for w, mesh in enumerate(meshes) if mesh.is_multi_process}
    step.carry_out(process, workers, spread_out, in_flight)
    wants = expected(lists, there, step)
    wrong = []
    for w, worker in workers.items():
        for buffer, want in wants[w].items():
            array = links.arrived[buffer.microbatch] if buffer.value == "tag" else worker.read(buffer)
            if not same_here(array, want):
                wrong.append([w, str(buffer)])
    sent = {id(e) for e in step.exchanges.values() if e.program is not None}
    return {"seed": seed, "schedule": name, "workers": len(lists), "sends": len(sent), "wrong": wrong}


def buffers_of(i: Instruction) -> list[Buffer]:
    """The buffers that an instruction names."""
    match i:
        case Run() | Apply():
            return [*i.reads, *i.writes]
        case Accumulate():
            return [i.into, i.value]
        case Send() | Recv():
            return [i.value]
        case Free():
            return list(i.values)
        case _:
            return []


def _placed(array: Any, place: NamedSharding) -> Any:
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def carried_out(o: dict[str, Any]) -> list[dict[str, Any]]:
    """Cases in this process, one behind the other."""
    moves, found, seed = MovePrograms(), [], o["first"]
    while len(found) < o["cases"]:
        done = case(seed, o["process"], o["processes"], moves)
        seed += 1
        found += [] if done is None else [done]
    return found


@click.command()
@click.option("--cases", default=200, help="How many are drawn.")
@click.option("--first", default=0, help="Number of the first.")
@click.option("--processes", default=2, help="That carry them out.")
@click.option("--devices", default=4, help="Of each process.")
def main(cases: int, first: int, processes: int, devices: int) -> None:
    """Carries drawn cases out; exits with 1 if something arrived otherwise than it was made."""
    worlds = results(
        run("drawn_lists", processes, devices=devices, cases=cases, first=first, limit_s=60.0 + 20.0 * cases)
    )
    wrong = sum(bool(one["wrong"]) for found in worlds for one in found)
    sends = sum(one["sends"] for one in worlds[0])
    names = sorted({one["schedule"] for one in worlds[0]})
    click.echo(f"{len(worlds[0])} cases in {processes} processes, {sends} sends, {wrong} wrong; {', '.join(names)}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
