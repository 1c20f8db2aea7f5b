"""Least sends of nearly equal stages of a step: the narrowest cuts of the graph, over the links that they cross.

`sends_of` is where a caller starts. The forward pass is cut near each multiple of an S-th of its FLOPs, where the
fewest bytes are alive; a loop over stacks of parameters may be cut between its trips. Stage k has the k-th S-th of the
devices, and sends its cut to the next one: `autopar.cost.send_s`. Cotangents take as long.

With p the seconds of a stage and c those of all cuts, of one microbatch each, and as many in flight as eager 1F1B and
ZB-H2 have, m microbatches take no less than

    p (m + bubble) + 2 c                      the first passes all cuts, the last all of them back
    m (S p + 2 c) / (2 S - 1)                 one in flight is done before the next begins
    m times the longest cut                   a link takes one after another

Where weight gradients fill the bubble they hide what is sent back as well. Shardings and memory have no part in it, so
it is an estimate.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import send_s, total_flops
from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.search.problem import Problem


@dataclass(frozen=True)
class StageSends:
    """Sends of so many stages.

    Args:
        stages: S.
        cuts: of each cut the seconds of a message, and those of the bytes of the whole batch.
        trains: whether cotangents are sent back.
    """

    stages: int
    cuts: tuple[tuple[float, float], ...] = ()
    trains: bool = True

    def step_s(self, count: int, busy_s: float, bubble: float, exposed: float = 1.0) -> float:
        """Seconds of a step.

        Args:
            count: m.
            busy_s: p m.
            bubble: passes of a microbatch through a stage that stages wait for.
            exposed: share of the sends of one microbatch, forward and back, that stages wait for.
        """
        each_s = [start_s + whole_s / count for start_s, whole_s in self.cuts]
        chain_s, turn_s = (1 + self.trains) * sum(each_s), 0.0
        if self.trains:
            turn_s = (self.stages * busy_s + count * chain_s) / (2 * self.stages - 1)
        return max(busy_s * (1 + bubble / count) + exposed * chain_s, turn_s, count * max(each_s, default=0.0))

    def filled_s(self, count: int, busy_s: float, left: float, least: float = 0.0) -> float:
        """`step_s` where weight gradients fill the bubble of 1F1B.

        They wait without holding more than there is where all microbatches are in flight anyway: of one it is sure that
        they may, of as many as there are stages that they may not. Of one, passes are a chain, and fill half as much.

        Args:
            count: m.
            busy_s: p m.
            left: share of the bubble that they leave where there is a microbatch for each stage.
            least: 1 where they may hold as much as they like, 0 where nothing more than 1F1B holds.
        """
        others = self.stages - 1
        together = min(1.0, (count - 1) / max(1, others))
        filled = 1 - together * (1 - least)
        bubble, exposed = left * (2 - together), 1 - together / 2
        return self.step_s(count, busy_s, others * (filled * bubble + 1 - filled), filled * exposed + 1 - filled)


def sends_of(problem: Problem, stages: int) -> StageSends:
    """Sends of so many stages of a problem.

    Args:
        problem: the step in one microbatch, and all devices.
        stages: their number.
    """
    graph, cluster = problem.graph, problem.cluster
    trains = any(phase_of(op) == "backward" for op in graph.operators)
    if not 1 < stages <= cluster.num_devices:
        return StageSends(stages, trains=trains)
    key = problem.store.key("sends", graph, cluster, stages)
    return problem.store.once(key, lambda: StageSends(stages, _cuts(graph, cluster, stages), trains))


def _cuts(graph: Graph, cluster: Cluster, stages: int) -> tuple[tuple[float, float], ...]:
    """Cuts as of `StageSends`."""
    starts = [k * cluster.num_devices // stages for k in range(stages + 1)]
    parts = [range(a, b) for a, b in itertools.pairwise(starts)]
    cuts = []
    for k, nbytes in enumerate(narrowest_cuts(graph, stages)):
        start_s, whole_s = (send_s(cluster, n, parts[k], parts[k + 1]) for n in (0.0, nbytes))
        cuts.append((start_s, whole_s - start_s))
    return tuple(cuts)


def narrowest_cuts(graph: Graph, stages: int) -> list[float]:
    """Least bytes of the whole batch across each cut of the forward pass into so many nearly equal parts.

    Args:
        graph: the step.
        stages: parts, each with half an S-th of the FLOPs more or less on either side.
    """
    shares, nbytes = _profile(graph)
    if not len(shares):
        return []
    cuts = []
    for k in range(1, stages):
        near = np.abs(shares - k / stages) <= 1 / (2 * stages)
        cuts.append(float(nbytes[near].min() if near.any() else nbytes[np.abs(shares - k / stages).argmin()]))
    return cuts


def _profile(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """The forward pass where it may be cut: the share of its FLOPs before, and the bytes that are alive."""
    batch = {i.name for i in graph.inputs if i.role == "batch"}
    forward = [op for op in dependents(graph.operators, batch) if phase_of(op) == "forward"]
    first, last = dict[str, int](), dict[str, int]()
    for n, op in enumerate(forward):
        last.update((o, n) for o in op.reads if o in first)
        first.update((v.name, n) for v in op.results)
    change = np.zeros(len(forward) + 1)
    for name, end in last.items():
        change[first[name]] += graph.types[name].nbytes
        change[end] -= graph.types[name].nbytes
    alive = np.cumsum(change)
    flops, nbytes = list[float](), list[float]()
    for n, op in enumerate(forward):
        trips = _trips(op, batch | first.keys())
        flops += [total_flops(graph, op) / trips] * trips
        if trips > 1:
            scan = Scan.of(op)
            carried = sum(v.type.nbytes for v in op.results[: scan.num_carry])
            past = alive[n] - sum(graph.types[v.name].nbytes for v in op.results if last.get(v.name, n) > n)
            nbytes += [float(carried + past)] * (trips - 1)
        nbytes.append(float(alive[n]))
    total = sum(flops)
    if not total:
        return np.zeros(0), np.zeros(0)
    shares = np.cumsum(flops) / total
    inside = (shares > 0) & (shares < 1)
    return shares[inside], np.array(nbytes)[inside]


def _trips(op: Operator, of_batch: set[str]) -> int:
    """Trips of a loop over stacks none of which is of the batch; 1 of another operator."""
    if op.primitive != "scan" or not op.regions:
        return 1
    scan = Scan.of(op)
    stacks = scan.split(op.operands)[2]
    is_of_layers = bool(stacks) and not any(isinstance(o, str) and o in of_batch for o in stacks)
    return scan.length if is_of_layers and scan.length > 1 else 1
