"""Seconds of a choice by kind of work, and what devices wait for the host to start their kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from autopar.cost import CostModel
from autopar.ir import Graph, Operator, Value
from autopar.ir.analysis import closure
from autopar.ir.loops import Scan
from autopar.ir.phases import LOOP
from autopar.search.intra.draft import SiteDraft
from autopar.search.intra.sharding_problem import ShardingProblem


class Works:
    """Adds up seconds by kind of work, which plans tell of graphs with a loop over microbatches.

    "weight" is that part of "backward" that no other stage waits for: gradients of parameters.

    Args:
        sharding_problem: from `build`.
        graph: what was planned.
        cost: what things cost.
        met: paths of outputs that are made where examples meet.
    """

    def __init__(
        self, sharding_problem: ShardingProblem, graph: Graph, cost: CostModel, met: Set[str] = frozenset()
    ) -> None:
        self.cost = cost
        self.loops = any(r.id.startswith(LOOP) for r in sharding_problem.region_sites)
        self.seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "update": 0.0, "weight": 0.0}
        self.host_s: dict[str, float] = defaultdict(float)
        self.sent = _sent(graph) if self.loops else frozenset()
        self.meeting = _made_once(graph, met)
        if met:
            self.seconds["meeting"] = 0.0

    def add(self, id: str, phase: str, seconds: float) -> None:
        """``seconds`` of the operator ``id``."""
        kind = self._kind(id, phase)
        self.seconds[kind] += seconds
        if kind == "backward" and outermost(id) not in self.sent:
            self.seconds["weight"] += seconds

    def start(self, site: SiteDraft) -> None:
        """The host starts an operator, as often as it runs, if it is a kernel of its own."""
        if not site.work.fused and (site.work.flops or site.work.bytes):
            each_s = self.cost.start_s(backward=site.phase == "backward")
            self.host_s[self._kind(site.id, site.phase)] += site.weight * each_s

    def _kind(self, id: str, phase: str) -> str:
        inside = id.startswith(LOOP) and "/body/" in id
        if self.meeting and (id in self.meeting or id.startswith(tuple(f"{op}/" for op in self.meeting))):
            return "meeting"
        return ("backward" if phase == "backward" else "forward") if inside else "update"

    @property
    def stall_s(self) -> float:
        """Seconds that devices wait for the host."""
        kinds = [k for k in self.seconds if k != "weight"]
        return sum(self.cost.together_s(self.seconds[k], self.host_s[k]) - self.seconds[k] for k in kinds)

    def times(self) -> tuple[tuple[str, float], ...]:
        """(kind, seconds), with what devices wait for the host; empty where there is no such loop."""
        if not self.loops:
            return ()
        longer = {k: self.cost.together_s(s, self.host_s[k]) for k, s in self.seconds.items() if k != "weight"}
        share = longer["backward"] / self.seconds["backward"] if self.seconds["backward"] else 1.0
        return (*longer.items(), ("weight", self.seconds["weight"] * share))


def _made_once(graph: Graph, paths: Set[str]) -> frozenset[str]:
    """Operators that make some outputs, but for loops over microbatches and what these take."""
    wanted = [o.operand for o in graph.outputs if o.path in paths]
    return frozenset(op.id for op in closure(graph.operators, wanted, within=lambda op: not op.id.startswith(LOOP)))


def outermost(id: str) -> str:
    """The operator of a loop over microbatches that an operator is, or is inside of."""
    loop, _, rest = id.partition("/body/")
    return f"{loop}/body/{rest.partition('/body/')[0]}"


def loops(graph: Graph) -> list[Operator]:
    """The loops over microbatches."""
    return [op for op in graph.operators if op.primitive == "scan" and op.id.startswith(LOOP)]


def carried(graph: Graph) -> list[Value]:
    """What the loops over microbatches carry on from one to the next: gradients that are added up, losses."""
    return [v for loop in loops(graph) for v in loop.results[: Scan.of(loop).num_carry]]


def _sent(graph: Graph) -> frozenset[str]:
    """Operators of the loops over microbatches on which something that leaves the stage in its turn depends."""
    ids: set[str] = set()
    for loop in loops(graph):
        body = loop.region("body")
        sent = [v.name for op in body.operators if op.primitive == "stage_boundary" for v in op.results]
        ids.update(f"{loop.id}/body/{op.id}" for op in closure(body.operators, sent))
    return frozenset(ids)
