"""Seconds of a choice by kind of work, and what devices wait for the host to start their kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from autopar.cost import CostModel
from autopar.ir import Graph
from autopar.ir.analysis import closure
from autopar.ir.phases import is_stage_loop
from autopar.ir.primitives import is_fusible
from autopar.search.intra.draft import SiteDraft
from autopar.search.intra.program import ProgramCost
from autopar.search.intra.stage_loops import StageLoops


class Works:
    """Adds up seconds by kind of work, which plans tell of graphs with a loop over microbatches.

    "weight" is that part of "backward" that no other stage waits for: gradients of parameters.

    Args:
        graph: what was planned.
        cost: what things cost.
        met: paths of outputs that are made where examples meet.
    """

    def __init__(self, graph: Graph, cost: CostModel, met: Set[str] = frozenset()) -> None:
        self.cost = cost
        self.loops = StageLoops(graph)
        self.seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "update": 0.0, "weight": 0.0}
        self.host_s: dict[str, float] = defaultdict(float)
        self.besides_s: dict[str, float] = defaultdict(float)
        self.sent = _sent(self.loops)
        self.meeting = _made_once(graph, met)
        if met:
            self.seconds["meeting"] = 0.0

    def add(self, id: str, phase: str, seconds: float) -> None:
        """``seconds`` of the operator ``id``."""
        kind = self._kind(id, phase)
        self.seconds[kind] += seconds
        if kind == "backward" and self.loops.outermost(id) not in self.sent:
            self.seconds["weight"] += seconds

    def start(self, site: SiteDraft, ends: Set[str]) -> None:
        """The host starts an operator, as often as it runs, if it is a kernel of its own or ends one; see `ends_of`."""
        if site.id in ends:
            each_s = self.cost.start_s(backward=site.phase == "backward")
            self.host_s[self._kind(site.id, site.phase)] += site.weight * each_s

    def add_cost(self, more: ProgramCost) -> float:
        """Adds what a program takes beyond what was traced; returns its seconds but for those of the host."""
        if more.of != "device":
            of = self.host_s if more.of == "host" else self.besides_s
            of[self._kind(more.consumer, more.phase)] += more.seconds
            return 0.0 if more.of == "host" else more.seconds
        self.add(more.consumer, more.phase, more.seconds)
        return more.seconds

    def _kind(self, id: str, phase: str) -> str:
        if self.meeting and (id in self.meeting or id.startswith(tuple(f"{op}/" for op in self.meeting))):
            return "meeting"
        return ("backward" if phase == "backward" else "forward") if self.loops.holds(id) else "update"

    @property
    def stall_s(self) -> float:
        """Seconds that devices wait for the host."""
        kinds = [k for k in self.seconds if k != "weight"]
        return sum(self.cost.together_s(self.seconds[k], self.host_s[k]) - self.seconds[k] for k in kinds)

    def times(self) -> tuple[tuple[str, float], ...]:
        """(kind, seconds), with what devices wait for the host; empty where there is no such loop."""
        if not self.loops.bodies:
            return ()
        longer = {k: self.cost.together_s(s, self.host_s[k]) for k, s in self.seconds.items() if k != "weight"}
        share = longer["backward"] / self.seconds["backward"] if self.seconds["backward"] else 1.0
        whole = {k: s + self.besides_s[k] for k, s in longer.items()}
        return (*whole.items(), ("weight", self.seconds["weight"] * share))


def ends_of(sites: Sequence[SiteDraft]) -> frozenset[str]:
    """Operators that are kernels of their own or the last of one.

    One kernel computes elementwise operators of one shape that read each other in one pass, and writes what of them is
    kept for the other pass.
    """
    readers: dict[str, list[SiteDraft]] = defaultdict(list)
    for s in sites:
        for name in s.op.reads:
            readers[s.id.removesuffix(s.op.id) + name].append(s)

    def goes_on(s: SiteDraft) -> bool:
        if not is_fusible(s.op):
            return False
        results = ((s.id.removesuffix(s.op.id) + v.name, v.type.shape) for v in s.op.results)
        return any(
            r.phase == s.phase and is_fusible(r.op) and r.op.results[0].type.shape == shape
            for key, shape in results
            for r in readers[key]
        )

    return frozenset(s.id for s in sites if not s.work.fused and (s.work.flops or s.work.bytes) and not goes_on(s))


def _made_once(graph: Graph, paths: Set[str]) -> frozenset[str]:
    """Operators that make some outputs, but for loops over microbatches and what these take."""
    wanted = [o.operand for o in graph.outputs if o.path in paths]
    return frozenset(op.id for op in closure(graph.operators, wanted, within=lambda op: not is_stage_loop(op)))


def _sent(loops: StageLoops) -> frozenset[str]:
    """Operators of the loops over microbatches on which something that leaves the stage in its turn depends."""
    ids: set[str] = set()
    for prefix, body in loops.bodies.items():
        sent = [v.name for op in body.operators if op.primitive == "stage_boundary" for v in op.results]
        ids.update(prefix + op.id for op in closure(body.operators, sent))
    return frozenset(ids)
