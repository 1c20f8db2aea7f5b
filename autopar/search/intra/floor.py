"""Bytes that every sharding of a graph holds on a device, before anything is stated.

A statement says of each value when it is in memory and how much of it a device has in each layout; the least of these,
added up over the values of a time, is what `autopar.solver.memory.memory_floor` says. Where that exceeds the limit the
statement was for nothing. `held_bytes` counts less, in a part of the time: inputs, results that no compiler fuses,
from the operator that makes them to the last that reads them, and what microbatches in flight wait with, each in the
finest layout that its shape has on a mesh. So what it says is a floor of that floor.

Of a step in m microbatches the values of the passes have an m-th of the bytes, or more where they do not depend on the
batch; inputs, and what updates make, are as large. So the graph of one microbatch has a floor for every m.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.attention import attention_cores, on_chip_operators
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop, phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator
from autopar.search.intra.memory import IN_FLIGHT, OTHER_STAGES
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.intra.stage_loops import state_replaced
from autopar.search.problem import Problem


def held_bytes(problem: Problem, mesh: LogicalMesh, microbatches: int = 1) -> float:
    """Bytes a device that every sharding of a problem on a mesh holds at some time; 0 where state may lie on hosts.

    Args:
        problem: what is sharded.
        mesh: the logical mesh.
        microbatches: into which its graph, that of one microbatch, is cut.
    """
    if problem.job.offload != "none":
        return 0.0
    cost, graph = problem.cost_model, problem.graph
    lives = graph.fact(_on_chip_lives if cost.knows_kernels and cost.stack.fused_attention else _lives)
    sizes = tuple(n for _, n in mesh.axes)
    bytes = lives.most(sizes, problem.job.donated, microbatches, halves=cost.halves_products)
    extra = problem.subproblem.extra_in_flight
    each = (_shard_bytes(type, sizes, halves=cost.halves_products) for type in lives.in_flight)
    return bytes + (extra * sum(each) if extra else 0.0)


def held_elsewhere(problem: Problem, known: ShardingProblem, mesh: LogicalMesh) -> float:
    """Bytes a device that every sharding of a problem holds on a mesh, by how it is stated on another one.

    When a value is in memory, as it is or as a copy that several share, follows from the graph. While an operator runs
    it lies besides as this operator takes it, which depends on the mesh and is left out. 0 where state may lie on
    hosts.

    Args:
        problem: what is sharded.
        known: it as it is stated.
        mesh: where it is not.
    """
    if problem.job.offload != "none":
        return 0.0
    nodes = {key: {v.node} for key, v in known.values.items()}
    for copy in known.copies:
        nodes[copy.key].add(copy.node)
    times: dict[tuple[str, str], tuple[int, int]] = {}
    for u in known.usages:
        if u.kind != OTHER_STAGES and u.node in nodes.get(u.key, ()):
            of = u.key, u.kind if u.kind == IN_FLIGHT else ""
            start, stop = times.get(of, (u.start, u.stop))
            times[of] = min(start, u.start), max(stop, u.stop)
    sizes, halves = tuple(n for _, n in mesh.axes), problem.cost_model.halves_products
    changes = np.zeros(max((stop for _, stop in times.values()), default=0) + 1)
    for (key, kind), (start, stop) in times.items():
        bytes = _shard_bytes(known.values[key].type, sizes, halves=halves)
        bytes *= problem.subproblem.extra_in_flight if kind else 1
        changes[start] += bytes
        changes[stop] -= bytes
    return float(np.cumsum(changes).max(initial=0.0))


@dataclass(frozen=True)
class _Life:
    """Time in which a value is in memory.

    Args:
        type: of the value.
        start, stop: the first time, and the first after it.
        repeats: whether it is made in each microbatch.
        input: name of the input of the step that it is, or "".
    """

    type: TensorType
    start: int
    stop: int
    repeats: bool = False
    input: str = ""


@dataclass
class _Lives:
    """Values of a step that are in memory in any case.

    Args:
        on_chip: whether values inside of attention never are.
        lives: of them.
        in_flight: types of values that the forward pass of a stage makes and its backward pass takes.
        time: of the operator at hand, each being a step of time, bodies of loops in place.
    """

    on_chip: bool
    lives: list[_Life] = field(default_factory=list)
    in_flight: list[TensorType] = field(default_factory=list)
    time: int = 0

    def of_step(self, graph: Graph) -> _Lives:
        """These, with all values of a step."""
        last = self._walk(graph, "update")
        # What the passes alone read may be read before the first microbatch, and given back.
        updated = {o for op in graph.operators if phase_of(op, "update") == "update" for o in op.reads}
        for i in graph.inputs:
            self.lives.append(_Life(i.type, 0, last[i.name] if i.name in updated else 0, input=i.name))
        return self

    def _walk(self, graph: Graph, enclosing: str) -> dict[str, int]:
        """Adds the values that the operators of a graph make; the time at which each value is read last.

        Args:
            graph: the step or a body.
            enclosing: phase of the operator whose body it is.
        """
        results: dict[str, tuple[int, TensorType, bool]] = {}
        last: dict[str, int] = {}
        never = on_chip_operators(graph, graph.fact(attention_cores)) if self.on_chip else frozenset[str]()
        for op in graph.operators:
            self.time += 1
            last.update(dict.fromkeys(op.reads, self.time))
            phase = phase_of(op, enclosing)
            for _, region in op.regions:
                self._walk(region, phase)
                self.in_flight += _types_in_flight(region, phase) if is_stage_loop(op) else ()
            if op.regions:
                self.time += 1
                last.update(dict.fromkeys(_stacks_of(op), self.time))
            if op.id not in never and _is_stored(op):
                results.update((v.name, (self.time, v.type, phase != "update")) for v in op.results)
        for name, (start, type, repeats) in results.items():
            if last.get(name, 0) > start:
                self.lives.append(_Life(type, start, last[name], repeats))
        return last

    def most(self, sizes: Sequence[int], donated: Collection[str], microbatches: int, *, halves: bool) -> float:
        """The most bytes a device of any time.

        Args:
            sizes: of the axes of a mesh.
            donated: inputs whose buffers the step may reuse.
            microbatches: their number.
            halves: see `_shard_bytes`.
        """
        changes = np.zeros(self.time + 2)
        shard_bytes: dict[TensorType, float] = {}
        for life in self.lives:
            type = life.type
            if type not in shard_bytes:
                shard_bytes[type] = _shard_bytes(type, sizes, halves=halves)
            bytes = shard_bytes[type] / (microbatches if life.repeats else 1)
            changes[life.start] += bytes
            changes[life.stop if not life.input or life.input in donated else -1] -= bytes
        return float(np.cumsum(changes[:-1]).max(initial=0.0))


def _lives(graph: Graph) -> _Lives:
    """Values of a step on devices that write all results of attention."""
    return _Lives(False).of_step(graph)


def _on_chip_lives(graph: Graph) -> _Lives:
    """Values of a step on devices that keep what is inside of attention on the chip."""
    return _Lives(True).of_step(graph)


def _types_in_flight(body: Graph, enclosing: str) -> list[TensorType]:
    """Types of what the operators of a stage's loop make in the forward pass, and take in the backward pass.

    Args:
        body: of the loop.
        enclosing: phase of the loop.
    """
    phases = {op.id: phase_of(op, enclosing) for op in body.operators}
    taken = {o for op in body.operators if phases[op.id] == "backward" for o in op.reads}
    forward = (op for op in body.operators if phases[op.id] == "forward" and not _is_no_value(op))
    results = (v for op in forward for v in op.results[Scan.of(op).num_carry if op.primitive == "scan" else 0 :])
    return [v.type for v in results if v.name in taken]


def _shard_bytes(type: TensorType, sizes: Sequence[int], *, halves: bool) -> float:
    """Bytes of the least shard of a value.

    Args:
        type: of the value.
        sizes: of the axes of a mesh.
        halves: whether what products read as half of its bits may be stored so.
    """
    return (min(type.nbytes, 2 * type.size) if halves else type.nbytes) / most_shards(type, sizes)


def _is_no_value(op: Operator) -> bool:
    """Whether what an operator makes is another name, in another value, or made on demand."""
    return op.primitive in ALIASES or op.primitive == "dynamic_update_slice" or is_generator(op)


def _is_stored(op: Operator) -> bool:
    """Whether an operator writes its results where they are new, whoever reads them."""
    if _is_no_value(op):
        return False
    return op.primitive == "scan" if op.regions else not is_fusible(op)


def _stacks_of(op: Operator) -> list[str]:
    """Stacks of which a loop takes slices; they are there until it ends."""
    if op.primitive != "scan":
        return []
    kept = state_replaced(op)
    stacks = enumerate(op.operands[Scan.of(op).num_whole :], Scan.of(op).num_whole)
    return [o for n, o in stacks if isinstance(o, str) and n not in kept]


def most_shards(type: TensorType, sizes: Sequence[int]) -> int:
    """Shards into which a value can be split on a mesh: each axis splits one dim that it divides, or none.

    Args:
        type: of the value.
        sizes: of the axes.
    """
    if type.dtype.startswith("key<") or not type.size:
        return 1
    most = 1
    for dims in itertools.product(range(-1, type.rank), repeat=len(sizes)):
        shards = [math.prod(n for n, at in zip(sizes, dims, strict=True) if at == dim) for dim in range(type.rank)]
        if all(size % n == 0 for size, n in zip(type.shape, shards, strict=True)):
            most = max(most, math.prod(shards))
    return most
