"""Seconds of a step by group of operators: as its compiler's figures say, and as its plan predicts.

`estimated` reads a compiled program, `planned_seconds` a plan of one stage, in the same groups.

The text of a compiled program lists instructions in the order in which they run. What computes takes as long as the
compiler's cost model says:

    TPU     ``estimated_cycles`` of a kernel over the clock. Copies between memories have none, nor has what runs no
            kernel: both are free here, for copies run while the cores compute
    GPU     ``reification_cost`` (option ``xla_gpu_collect_cost_model_stats``): ``exec_time_us`` of a fusion; of a
            product the larger of computing and memory in its model of matrix products. That model's ``exec_time_us``
            is 20 times as long (its traffic of tiles), and so is what the model of fusions says of products, which
            knows no tensor cores: both are left out
    else    FLOPs of products and bytes of operands and results, by the roofline of the device

Collectives are priced by the links of the plan's cluster, at the kind, bytes and groups that were compiled. One that
is started and finished by two instructions overlaps with what stands between them; links carry one at a time. Any
other stops the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import PRODUCTS, CostModel, matrices_of, product_dtype
from autopar.ir import Graph, Layout, Operator, item_bytes
from autopar.ir.loops import runs_inside
from autopar.lower.aot.base import Target
from autopar.lower.aot.collectives import GroupNames
from autopar.lower.hlo import (
    CHAIN,
    COLLECTIVES,
    CYCLES,
    HloCollective,
    HloModule,
    Instruction,
    as_emitted,
    called,
    listed_groups,
    parse_module,
    read_collectives,
    split_operands,
    tensors_of,
)
from autopar.plan import Plan

_COSTS = re.compile(r'"reification_cost":\[(.*?)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCT_CALL = re.compile(r"gemm|matmul|cudnn\$conv|dot", re.IGNORECASE)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\[([^\]]*)\])')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_DIMS = re.compile(r"[a-z]\w*\[([\d,]*)\]")
#: Instructions that run nothing, or whose seconds are those of what they start.
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
     "opt-barrier", "copy-start", "slice-start", "async-update", "send", "recv", "add-dependency"}
)  # fmt: skip
_INNER = frozenset({"while", "conditional", "call"})
_SUMMED = ("products_s", "memory_s", "collectives_s", "exposed_s", "asynchronous_s")


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of a step by group of operators.

    Args:
        products_s: matrix products and convolutions, with what is fused into them.
        memory_s: all other kernels.
        collectives_s: all collectives, hidden or not.
        exposed_s: of them, those that no computation hides.
        asynchronous_s: of them, those that run in parallel with computation as far as it lasts.
        said: share of the seconds of kernels that the compiler itself said; of a plan 0.
    """

    products_s: float
    memory_s: float
    collectives_s: float
    exposed_s: float
    asynchronous_s: float = 0.0
    said: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the step: what computes, and what is exposed of collectives."""
        return self.products_s + self.memory_s + self.exposed_s

    def times(self, count: float) -> StepSeconds:
        """The seconds of ``count`` runs."""
        return msgspec.structs.replace(self, **{n: count * getattr(self, n) for n in _SUMMED})


def together(parts: Sequence[StepSeconds]) -> StepSeconds:
    """The seconds of programs that run one after the other."""
    sums = {n: math.fsum(getattr(p, n) for p in parts) for n in _SUMMED}
    kernels = math.fsum(p.products_s + p.memory_s for p in parts)
    said = math.fsum(p.said * (p.products_s + p.memory_s) for p in parts)
    return StepSeconds(**sums, said=said / kernels if kernels else 0.0)


@dataclass(frozen=True)
class Rates:
    """Rates from which seconds are computed.

    Args:
        clock_hz: clock of the cores whose cycles the compiler estimates; None where it estimates none.
        roofline_s: seconds of so many FLOPs and bytes in a dtype of the jaxpr.
        collective_s: seconds of a collective of so many bytes of the full tensor.
    """

    clock_hz: float | None
    roofline_s: Callable[[float, float, str], float]
    collective_s: Callable[[HloCollective, float], float]


def estimated(text: str, rates: Rates) -> StepSeconds:
    """The seconds of one run of a program.

    Args:
        text: optimized HLO whose instructions stand in the order in which they run.
        rates: of its devices.

    Raises:
        ValueError: the text is not the HLO of a compiled program.
    """
    module = parse_module(listed_groups(text))
    return _ComputationWalk(module, rates).run(module.entry)


@dataclass
class _ComputationClock:
    """Progress of a computation: seconds by group, and collectives under way."""

    now: float = 0.0
    link_free: float = 0.0
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    products_s: float = 0.0
    memory_s: float = 0.0
    reported_s: float = 0.0
    collectives_s: float = 0.0
    exposed_s: float = 0.0
    asynchronous_s: float = 0.0

    def compute(self, seconds: float, *, product: bool, said: bool) -> None:
        self.now += seconds
        self.reported_s += seconds if said else 0.0
        if product:
            self.products_s += seconds
        else:
            self.memory_s += seconds

    def start(self, key: str, seconds: float) -> None:
        begin = max(self.now, self.link_free)
        self.link_free = begin + seconds
        self.ends[key] = (self.link_free, self.products_s + self.memory_s)
        self.collectives_s += seconds
        self.asynchronous_s += seconds

    def finish(self, key: str) -> None:
        end, _ = self.ends.pop(key, (0.0, 0.0))
        self.exposed_s += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def stop_for(self, seconds: float) -> None:
        begin = max(self.now, self.link_free)
        self.exposed_s += begin - self.now + seconds
        self.now = self.link_free = begin + seconds
        self.collectives_s += seconds

    def add(self, inner: StepSeconds) -> None:
        self.now += inner.total_s
        self.products_s += inner.products_s
        self.memory_s += inner.memory_s
        self.reported_s += inner.said * (inner.products_s + inner.memory_s)
        self.collectives_s += inner.collectives_s
        self.exposed_s += inner.exposed_s
        self.asynchronous_s += inner.asynchronous_s

    def seconds(self) -> StepSeconds:
        for key in list(self.ends):
            self.finish(key)
        kernels = self.products_s + self.memory_s
        return StepSeconds(
            self.products_s, self.memory_s, self.collectives_s, self.exposed_s, self.asynchronous_s,
            self.reported_s / kernels if kernels else 0.0,
        )  # fmt: skip


class _ComputationWalk:
    """Runs computations of a module in the order of the text."""

    def __init__(self, module: HloModule, rates: Rates) -> None:
        self.module = module
        self.rates = rates
        self.shapes = {name: {i.name: i.shape for i in body} for name, body in module.computations.items()}

    def run(self, name: str) -> StepSeconds:
        clock = _ComputationClock()
        for i in self.module.computations[name]:
            self.step(i, name, clock)
        return clock.seconds()

    def step(self, i: Instruction, name: str, clock: _ComputationClock) -> None:
        """One instruction of the computation ``name``."""
        if i.opcode in _INNER:
            inner = [self.run(callee).times(count) for callee, count, _ in called(self.module, (i,), 1.0)]
            clock.add(together(inner))
            return
        if i.opcode.endswith("-done"):
            clock.finish(split_operands(i.operands)[0].strip().rpartition(" ")[2].lstrip("%"))
            return
        kind = i.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            seconds = self.sent_s(read_collectives(i, self.shapes[name], self.module.devices))
            if kind != i.opcode:
                clock.start(i.name, seconds)
            else:
                clock.stop_for(seconds)
            return
        if i.opcode == "async-start":
            inner_sent = self.inside(i)
            if inner_sent:
                clock.start(i.name, self.sent_s(iter(inner_sent)))
            return
        if i.opcode not in _FREE:
            self.kernel(i, name, clock)

    def kernel(self, i: Instruction, name: str, clock: _ComputationClock) -> None:
        """A kernel; parts of a collective that are fused into it begin with it, and end with the last of them."""
        chains = self.chains(i)
        whole = [] if chains else self.inside(i)
        if whole:
            clock.stop_for(self.sent_s(iter(whole)))
            return
        for chain, collectives in chains.items():
            if chain not in clock.ends and collectives:
                clock.start(chain, self.sent_s(iter(collectives)))
        product = self.product(i)
        seconds, said = self.reported_s(i, product=product), True
        if seconds is None:
            seconds, said = self.text_s(i, name), False
        clock.compute(seconds, product=product, said=said)
        if "AsyncCollectiveDone" in self.targets(i):
            for chain in chains:
                clock.finish(chain)

    def bodies(self, i: Instruction) -> list[str]:
        """Computations that an instruction calls, and those inside of them."""
        names: list[str] = []
        queue = [callee for callee, _, _ in called(self.module, (i,), 1.0)]
        while queue:
            body = queue.pop()
            if body not in names:
                names.append(body)
                queue += [callee for callee, _, _ in called(self.module, self.module.computations[body], 1.0)]
        return names

    def inside(self, i: Instruction) -> list[HloCollective]:
        """Collectives of the computations that an instruction calls."""
        return [
            as_emitted(c, body)
            for body in self.bodies(i)
            for inner in self.module.computations[body]
            for c in read_collectives(inner, self.shapes[body], self.module.devices)
        ]

    def chains(self, i: Instruction) -> dict[str, list[HloCollective]]:
        """Collectives that are fused into an instruction bit by bit, by chain."""
        by_chain: dict[str, list[HloCollective]] = {}
        for body in self.bodies(i):
            for inner in self.module.computations[body]:
                chain = CHAIN.search(inner.attributes)
                if chain is not None and inner.opcode.removesuffix("-start") in COLLECTIVES:
                    sent = list(read_collectives(inner, self.shapes[body], self.module.devices))
                    by_chain.setdefault(chain[1], sent)
        return by_chain

    def targets(self, i: Instruction) -> set[str]:
        """Names of the custom calls that an instruction is or calls."""
        inner = (j for body in self.bodies(i) for j in self.module.computations[body])
        return {t for j in (i, *inner) for t in _TARGET.findall(j.attributes)}

    def product(self, i: Instruction) -> bool:
        """Whether an instruction does a matrix product or convolution."""
        inner = (j for body in self.bodies(i) for j in self.module.computations[body])
        return any(
            j.opcode in ("dot", "convolution") or any(_PRODUCT_CALL.search(t) for t in _TARGET.findall(j.attributes))
            for j in (i, *inner)
        )

    def sent_s(self, collectives: Iterator[HloCollective]) -> float:
        """Seconds of the collectives of one instruction, which are sent together."""
        parts = [c for c in collectives if c.group_size > 1]
        return self.rates.collective_s(parts[0], sum(c.full_bytes for c in parts)) if parts else 0.0

    def reported_s(self, i: Instruction, *, product: bool) -> float | None:
        """Seconds that the compiler says; None where it says none."""
        cycles = CYCLES.search(i.attributes)
        if self.rates.clock_hz:
            return int(cycles[1]) / self.rates.clock_hz if cycles else 0.0
        costs = _COSTS.search(i.attributes)
        by_name = {c.get("name", ""): c for c in msgspec.json.decode(f"[{costs[1]}]")} if costs else {}
        model = by_name.get("experimental-gemm-cost-model" if product else "")
        if model is None:
            return None
        parts = ("compute_time_us", "memory_access_time_us") if product else ("exec_time_us",)
        microseconds = max(float(model[p]) for p in parts)
        return microseconds * 1e-6 if microseconds else None

    def text_s(self, i: Instruction, name: str) -> float:
        """Seconds of the FLOPs of products and the bytes of operands and results that the text shows."""
        operands = [tensors_of(o, self.shapes[name]) for o in split_operands(i.operands)]
        results = tensors_of(i.shape + " result", {})
        moved = sum(n for tensors in (*operands, results) for _, n in tensors)
        flops, dtype = self.flops(i, name), operands[0][0][0] if operands and operands[0] else "f32"
        inner = [(j, body) for body in self.bodies(i) for j in self.module.computations[body]]
        return self.rates.roofline_s(flops + sum(self.flops(j, body) for j, body in inner), moved, dtype)

    def flops(self, i: Instruction, name: str) -> float:
        """FLOPs of a product or convolution; 0 of others."""
        calls = i.opcode == "custom-call" and any(_PRODUCT_CALL.search(t) for t in _TARGET.findall(i.attributes))
        if i.opcode not in ("dot", "convolution") and not calls:
            return 0.0
        operands = [_dims(o, self.shapes[name]) for o in split_operands(i.operands)]
        result = _DIMS.search(i.shape)
        size = math.prod(_numbers(result[1])) if result else 0
        labels, summed = _LABELS.search(i.attributes), _CONTRACTED.search(i.attributes)
        if labels and len(operands) > 1:
            depth = math.prod(n for n, label in zip(operands[1], labels[1], strict=False) if label != "o")
        elif summed and operands:
            depth = math.prod(operands[0][d] for d in _numbers(summed[1] or summed[2] or ""))
        else:
            return 0.0
        return 2.0 * size * depth


def _dims(operand: str, shapes: dict[str, str]) -> tuple[int, ...]:
    shape, _, name = operand.strip().rpartition(" ")
    match = _DIMS.search(shape or shapes.get(name.lstrip("%"), ""))
    return _numbers(match[1]) if match else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def planned_seconds(plan: Plan, graph: Graph) -> StepSeconds:
    """The seconds of a step of a plan of one stage, by group.

    Args:
        plan: the plan.
        graph: of the function that it was made for.
    """
    (stage,) = plan.stages
    cost = CostModel(Cluster.from_json(plan.content.cluster))
    sizes, layouts = dict(stage.mesh_axes), {r.id: r for r in plan.content.operators}
    products_s = 0.0
    for id, op, owner, runs in _operators(graph):
        record = layouts.get(id)
        if op.primitive not in PRODUCTS or record is None:
            continue
        types = owner.operand_types(op)
        shapes = [
            Layout.parse(text).local_shape(t.shape, sizes) if text else t.shape
            for text, t in zip(record.operands, types, strict=True)
        ]
        result = Layout.parse(record.results[0]).local_shape(op.results[0].type.shape, sizes)
        product = matrices_of(op, shapes, result, item_bytes(types[0].dtype))
        if product is not None:
            products_s += runs * float(cost.product_s(product, product_dtype(op, types[0].dtype)))
    collectives_s = sum(c.seconds for c in stage.collectives)
    exposed_s = max(0.0, stage.step_time - stage.compute_time - stage.host_time)
    products_s = min(products_s, stage.compute_time)
    return StepSeconds(
        products_s, stage.compute_time - products_s, collectives_s, exposed_s, max(0.0, collectives_s - exposed_s)
    )


def _operators(graph: Graph, prefix: str = "", runs: float = 1.0) -> Iterator[tuple[str, Operator, Graph, float]]:
    """Operators with those inside of regions: their ids in plans, their graph, and how often they run in a step."""
    for op in graph.operators:
        yield prefix + op.id, op, graph, runs
        for name, region in op.regions:
            yield from _operators(region, f"{prefix}{op.id}/{name}/", runs_inside(op, runs))


def rates_of(target: Target, plan: Plan) -> Rates:
    """Rates that price the text of a compiled program of one stage.

    Args:
        target: what was compiled for.
        plan: of one stage: its cluster and mesh.
    """
    cluster = Cluster.from_json(plan.content.cluster)
    cost, axes = CostModel(cluster), plan.stages[0].mesh_axes
    (mesh,) = cluster.logical_meshes(tuple(n for _, n in axes))
    names = GroupNames(axes)

    def collective_s(sent: HloCollective, full_bytes: float) -> float:
        return cost.collective_s(sent.kind, full_bytes, _along(names.of(sent.kind, sent.groups), mesh), mesh)

    return Rates(target.clock_hz, lambda flops, bytes, dtype: cost.operator_s(flops, bytes, dtype), collective_s)


def _along(name: str, mesh: LogicalMesh) -> tuple[str, ...]:
    """Axes of a mesh by the name of groups; all axes where the groups are along none."""
    along = tuple(name.split("+"))
    return along if set(along) <= {a for a, _ in mesh.axes} else tuple(a for a, n in mesh.axes if n > 1)
