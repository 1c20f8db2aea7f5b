"""Seconds of a choice by kind of work, as the training program of a stack takes them.

The traced step says what is computed and sent. How a program carries it out is the stack's (`autopar.cost.constants`):
parts that it runs again whole, devices that wait for the slowest of them where they meet, gradients that every
microbatch adds to others, parameters that it keeps in the width of products. `program_costs` is what it takes beyond
what was traced. None of it depends on the strategies of the integer program but through the collectives that these
need, so that it is added to the answer. Devices also wait for the host to start their kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.cost import CostModel
from autopar.cost.constants import Stack
from autopar.ir import Graph, Layout, TensorType
from autopar.ir.analysis import closure
from autopar.ir.phases import MICROBATCHES, RECOMPUTED, STAGE, is_stage_loop
from autopar.ir.primitives import is_fusible
from autopar.ir.state_flow import StateFlow
from autopar.recompute.run_once import run_once
from autopar.search.intra.collectives import PricedCollective
from autopar.search.intra.sharding_problem import ShardingProblem, SiteDraft
from autopar.search.intra.stage_loops import StageLoops
from autopar.search.problem import Problem

#: Collectives at which devices wait for the slowest of them: each needs what all have computed.
_MEETINGS = frozenset({"all-reduce", "reduce-scatter"})
#: Kernels of a softmax with scale and causal mask between two conversions, less one: Megatron-LM's
#: ``forward_torch_softmax`` (megatron/model/fused_softmax.py).
_UNFUSED_SOFTMAX = 5
_PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """Seconds a step by which the program of the cluster's stack differs from the traced step.

    Args:
        consumer: operator, or loop over microbatches, that they are counted with.
        phase: of the step.
        seconds: below 0 where the program does less than was traced.
        of: "device", its "host", which is ahead of it where it can be, or "neither": added to what both take together.
    """

    consumer: str
    phase: str
    seconds: float
    of: Literal["device", "host", "neither"] = "device"


@dataclass(frozen=True)
class Answer:
    """A choice of strategies with its collectives.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node.
        layouts: layout of every value, see `value_layouts`.
        sent: its collectives.
        exposed_s: of each the seconds that computation does not hide.
        ends: operators that the host starts.
    """

    problem: Problem
    sharding_problem: ShardingProblem
    choice: Sequence[int]
    layouts: Mapping[str, Layout]
    sent: Sequence[PricedCollective]
    exposed_s: Sequence[float]
    ends: Set[str] = frozenset()

    @cached_property
    def loops(self) -> Mapping[str, int]:
        """Prefixes of keys in the loops over microbatches, and their numbers of microbatches."""
        return {
            f"{op.id}/body/": op.integer("length")
            for op in self.problem.graph.operators
            if {MICROBATCHES, STAGE}.intersection(op.marks)
        }

    @cached_property
    def sums(self) -> frozenset[str]:
        """Operators that add a microbatch's values to those of the others."""
        sums = set()
        for op in self.problem.graph.operators:
            if {MICROBATCHES, STAGE}.intersection(op.marks):
                body = op.region("body")
                carried = (o.operand for o in body.outputs[: op.integer("num_carry")])
                makers = (body.producers.get(o) for o in carried if isinstance(o, str))
                sums |= {f"{op.id}/body/{m.id}" for m in makers if m is not None and m.primitive in ("add", "add_any")}
        return frozenset(sums)

    @property
    def count(self) -> int:
        """Microbatches of a step."""
        return max(self.loops.values(), default=1)

    def in_loop(self, key: str) -> bool:
        """Whether a key is of something that every microbatch does."""
        return key.startswith(tuple(self.loops)) if self.loops else True

    @cached_property
    def parameters(self) -> Mapping[str, TensorType]:
        """Types of parameters by name."""
        return {i.name: i.type for i in self.problem.graph.inputs if i.role == "parameter"}

    def seconds(self, site: SiteDraft) -> float:
        """Seconds a step of an operator."""
        return float(site.seconds[self.choice[site.node]])

    def less(self, site: SiteDraft, share: float = 1.0) -> Iterator[ProgramCost]:
        """Costs below 0 of a share of an operator that the stack's program does not run."""
        yield ProgramCost(site.id, site.phase, -share * self.seconds(site))
        yield ProgramCost(site.id, site.phase, -share * self.start_s(site, site.phase), of="host")

    def start_s(self, site: SiteDraft, phase: str) -> float:
        """Seconds a step of the host to start an operator in a phase; 0 of one that is part of another kernel."""
        return (site.id in self.ends) * site.weight * self.problem.cost_model.start_s(backward=phase == "backward")

    def elements(self, name: str, type: TensorType) -> int:
        """Elements of an input on one device."""
        return math.prod(self.layouts[name].local_shape(type.shape, self.sharding_problem.mesh.sizes))

    @cached_property
    def flow(self) -> StateFlow:
        """Values that are computed from parameters alone, or are their gradients and updates."""
        return self.problem.graph.fact(StateFlow.of)

    def is_of_activation(self, c: PricedCollective) -> bool:
        """Whether a collective sends neither parameters or their gradients nor what an update takes."""
        return c.use.phase != "update" and c.value not in self.flow.parameters and c.value not in self.flow.gradients


def program_costs(answer: Answer) -> Iterator[ProgramCost]:
    """Yields the seconds that the program of the cluster's stack takes beyond an answer, where kernels are known."""
    cost = answer.problem.cost_model
    stack = cost.stack
    if not cost.knows_kernels:
        return
    left = run_once(answer.problem.graph) if stack.runs_whole_again else frozenset()
    if left:
        yield from _again(answer, left)
    if stack.gathers_again:
        yield from _gathered_again(answer, left)
    if stack.wait_s or stack.collective_s:
        yield from _meetings(answer, stack, left)
    if stack.softmax_batches > 1:
        yield from _softmax(answer, stack)
    if stack.keeps_narrow_parameters:
        yield from _narrow(answer, stack)
    if stack.accumulate_bytes:
        yield from _accumulated(answer, stack)
    if not stack.asynchronous and stack.dp_overlap:
        yield from _unhidden(answer)
    if stack.step_s:
        yield ProgramCost("", "update", stack.step_s, of="neither")
    for loop, count in (answer.loops or {"": 1}).items():
        yield ProgramCost(loop, "forward", count * stack.microbatch_s / 3, of="neither")
        yield ProgramCost(loop, "backward", count * stack.microbatch_s * 2 / 3, of="neither")


def _again(answer: Answer, left: Set[str]) -> Iterator[ProgramCost]:
    """Second runs of operators that run once as traced, where a program calls a layer's function again."""
    by_value = _values_of(answer, left)
    for s in answer.sharding_problem.sites:
        if s.id in left:
            yield ProgramCost(s.id, "backward", answer.seconds(s))
            yield ProgramCost(s.id, "backward", answer.start_s(s, "forward"), of="host")
    for c, seconds in zip(answer.sent, answer.exposed_s, strict=True):
        if c.value in by_value and c.use.phase == "forward":
            yield ProgramCost(by_value[c.value], "backward", seconds)


def _gathered_again(answer: Answer, left: Set[str]) -> Iterator[ProgramCost]:
    """Gathers of the parameters of what runs again: the plan keeps them for its backward pass, the program does not."""
    again = {s.id for s in answer.sharding_problem.sites if RECOMPUTED in s.op.marks} | left
    for c, seconds in zip(answer.sent, answer.exposed_s, strict=True):
        if c.kind == "all-gather" and c.use.consumer in again and c.value in answer.flow.parameters:
            yield ProgramCost(c.use.consumer, "backward", seconds)


def _values_of(answer: Answer, left: Set[str]) -> dict[str, str]:
    """Operators by the values that they make."""
    sites = (s for s in answer.sharding_problem.sites if s.id in left)
    return {s.id.removesuffix(s.op.id) + v.name: s.id for s in sites for v in s.op.results}


def _meetings(answer: Answer, stack: Stack, left: Set[str]) -> Iterator[ProgramCost]:
    """Waits for the slowest device wherever activations are summed, and what the host takes to start collectives."""
    by_value = _values_of(answer, left)
    for c in answer.sent:
        if not answer.is_of_activation(c):
            continue
        places = [(c.use.consumer, c.use.phase)]
        if c.value in by_value and c.use.phase == "forward":
            places.append((by_value[c.value], "backward"))
        for consumer, phase in places:
            yield ProgramCost(consumer, phase, c.weight * stack.collective_s, of="host")
            if c.kind in _MEETINGS:
                yield ProgramCost(consumer, phase, c.weight * stack.wait_s)


def _softmax(answer: Answer, stack: Stack) -> Iterator[ProgramCost]:
    """Starts of the kernels of a softmax whose heads the fused kernel does not take."""
    cost, sizes = answer.problem.cost_model, answer.sharding_problem.mesh.sizes
    for s in answer.sharding_problem.sites:
        if s.work.core and s.op.primitive == "exp" and not stack.fused_attention:
            layout = s.strategies[answer.choice[s.node]].result_layouts[0]
            *heads, _, _ = layout.local_shape(s.op.results[0].type.shape, sizes)
            if math.prod(heads) % stack.softmax_batches:
                start_s = cost.start_s(backward=s.phase == "backward")
                yield ProgramCost(s.id, s.phase, s.weight * _UNFUSED_SOFTMAX * start_s, of="host")


def _narrow(answer: Answer, stack: Stack) -> Iterator[ProgramCost]:
    """Conversions of parameters and of their gradients that a program makes once a step, and half of what it sends."""
    values, flow = answer.sharding_problem.values, answer.flow
    for s in answer.sharding_problem.sites:
        if s.op.primitive != "convert_element_type" or not answer.in_loop(s.id) or s.phase == "update":
            continue
        prefix = s.id.removesuffix(s.op.id)
        if any(prefix + name in flow.parameters for name in s.op.reads):
            again = s.phase == "backward" or RECOMPUTED in s.op.marks
            yield from answer.less(s, 1.0 if again else 1 - 1 / answer.count)
        elif any(prefix + v.name in flow.gradients for v in s.op.results):
            yield from answer.less(s)
    for c, seconds in zip(answer.sent, answer.exposed_s, strict=True):
        if c.bytes and not answer.is_of_activation(c):
            type = values[c.value].type
            width = type.nbytes / max(1, type.size)
            narrow = stack.gradient_bytes if c.kind in _MEETINGS else 2.0
            if narrow < width:
                yield ProgramCost(c.use.consumer, c.use.phase, seconds * (_narrowed(answer, c, narrow / width) - 1))


def _narrowed(answer: Answer, c: PricedCollective, share: float) -> float:
    """Seconds of a collective of a share of its bytes, over those of all."""
    axes, mesh, cost = tuple(c.axis.split("+")), answer.sharding_problem.mesh, answer.problem.cost_model
    whole_s = cost.collective_s(c.kind, c.bytes, axes, mesh)
    return cost.collective_s(c.kind, c.bytes * share, axes, mesh) / whole_s if whole_s else 1.0


def _accumulated(answer: Answer, stack: Stack) -> Iterator[ProgramCost]:
    """Bytes that every microbatch reads and writes to add its gradients to others, instead of the sums as traced."""
    sums = answer.sums
    for s in answer.sharding_problem.sites:
        if s.id in sums:
            yield from answer.less(s)
    stored = sum(answer.elements(name, type) for name, type in answer.parameters.items())
    gathered = sum(
        c.weight * c.bytes / max(1.0, type.nbytes / max(1, type.size)) / answer.count
        for c in answer.sent
        if c.kind == "all-gather" and c.use.phase == "forward" and c.value in answer.flow.parameters
        for type in (answer.sharding_problem.values[c.value].type,)
    )
    partitioned = gathered + stored * _partitioned_share(answer)
    moved_bytes = partitioned * stack.partition_bytes + (stored + gathered - partitioned) * stack.accumulate_bytes
    seconds = answer.problem.cost_model.operator_s(0.0, moved_bytes, "f32", starts=False)
    for loop, count in (answer.loops or {"": 1}).items():
        yield ProgramCost(loop, "backward", count * seconds / max(1, len(answer.loops)))


def _unhidden(answer: Answer) -> Iterator[ProgramCost]:
    """Seconds of collectives of parameters and gradients that no computation is left to hide.

    Each microbatch's own run next to both its passes, those of a step next to the last backward pass.
    """
    hidden_s = {True: 0.0, False: 0.0}
    for c, exposed_s in zip(answer.sent, answer.exposed_s, strict=True):
        if not answer.is_of_activation(c):
            hidden_s[bool(answer.loops) and answer.in_loop(c.value)] += c.seconds - exposed_s
    passes_s = {p: sum(answer.seconds(s) for s in answer.sharding_problem.sites if s.phase == p) for p in _PASSES}
    over_s = max(0.0, hidden_s[True] - sum(passes_s.values()))
    hiding_s = sum(passes_s.values()) if not answer.loops else passes_s["backward"] / answer.count
    yield ProgramCost("", "update", over_s + max(0.0, hidden_s[False] - hiding_s))


def _partitioned_share(answer: Answer) -> float:
    """Share of the parameters' elements whose optimizer's arrays lie in smaller parts than they do (ZeRO)."""
    lies: dict[tuple[int, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in answer.problem.graph.inputs:
        if i.role in ("parameter", "optimizer"):
            lies[i.type.shape][i.role].append(answer.elements(i.name, i.type))
    whole, partitioned = 0, 0
    for by_role in lies.values():
        parameters, state = by_role["parameter"], by_role["optimizer"]
        whole += sum(parameters)
        # As many arrays of the optimizer for each parameter, all of them as it lies, or some in smaller parts.
        if parameters and sum(state) * len(parameters) < sum(parameters) * len(state):
            partitioned += sum(parameters)
    return partitioned / whole if whole else 0.0


class Works:
    """Adds up seconds by kind of work, which plans tell of graphs with a loop over microbatches.

    "weight" is that part of "backward" that no other stage waits for: gradients of parameters. Each loop over layers,
    and what is outside of them, takes what device and host take together: a host that starts the many small kernels
    of layers no faster than these run is not ahead of the few large ones of a loss.

    Args:
        graph: what was planned.
        cost: what things cost.
        met: paths of outputs that are made where examples meet.
    """

    def __init__(self, graph: Graph, cost: CostModel, met: Set[str] = frozenset()) -> None:
        self.cost = cost
        self.loops = StageLoops(graph)
        self.seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "update": 0.0, "weight": 0.0}
        self.device_s: dict[tuple[str, str], float] = defaultdict(float)
        self.host_s: dict[tuple[str, str], float] = defaultdict(float)
        self.besides_s: dict[str, float] = defaultdict(float)
        self.sent = _sent(self.loops)
        self.meeting = _made_once(graph, met)
        if met:
            self.seconds["meeting"] = 0.0

    def add(self, id: str, phase: str, seconds: float) -> None:
        """``seconds`` of the operator ``id``."""
        kind = self._kind(id, phase)
        self.seconds[kind] += seconds
        self.device_s[kind, self.loops.layers(id)] += seconds
        if kind == "backward" and self.loops.outermost(id) not in self.sent:
            self.seconds["weight"] += seconds

    def start(self, site: SiteDraft, ends: Set[str]) -> None:
        """The host starts an operator, as often as it runs, if it is a kernel of its own or ends one; see `ends_of`."""
        if site.id in ends:
            each_s = self.cost.start_s(backward=site.phase == "backward")
            self.host_s[self._kind(site.id, site.phase), self.loops.layers(site.id)] += site.weight * each_s

    def add_cost(self, more: ProgramCost) -> float:
        """Adds what a program takes beyond what was traced; returns its seconds but for those of the host."""
        kind = self._kind(more.consumer, more.phase)
        if more.of == "host":
            self.host_s[kind, self.loops.layers(more.consumer)] += more.seconds
            return 0.0
        if more.of == "neither":
            self.besides_s[kind] += more.seconds
            return more.seconds
        self.add(more.consumer, more.phase, more.seconds)
        return more.seconds

    def _kind(self, id: str, phase: str) -> str:
        if self.meeting and (id in self.meeting or id.startswith(tuple(f"{op}/" for op in self.meeting))):
            return "meeting"
        return ("backward" if phase == "backward" else "forward") if self.loops.holds(id) else "update"

    @property
    def stall_s(self) -> float:
        """Seconds that devices wait for the host."""
        return sum(self._stalls_s().values())

    def _stalls_s(self) -> dict[str, float]:
        """Seconds by kind of work that devices wait for the host."""
        stalls_s: dict[str, float] = defaultdict(float)
        for kind, loop in sorted({*self.device_s, *self.host_s}):
            device_s = max(0.0, self.device_s[kind, loop])
            stalls_s[kind] += self.cost.together_s(device_s, max(0.0, self.host_s[kind, loop])) - device_s
        return stalls_s

    def times(self) -> tuple[tuple[str, float], ...]:
        """(kind, seconds), with what devices wait for the host; empty where there is no such loop."""
        if not self.loops.bodies:
            return ()
        stalls_s = self._stalls_s()
        longer = {k: s + stalls_s.get(k, 0.0) for k, s in self.seconds.items() if k != "weight"}
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
