"""Loops and branches: how layouts enter, are carried by and leave the regions of an operator.

scan: a carry has one layout, in which it enters each trip and leaves the loop; the body's result is
resharded to it each trip. Slices of stacked inputs and outputs have the layout of the stack without
its first dim, which is never split. A stack that it replaces slice by slice is written where it lies, in the layout
that it has there. Costs inside count once a trip (`length`). Loops over segments of layers take stacks whole, of which
their bodies read and write rows (`autopar.ir.layer_loops`): these too are split in other dims than the first.
while: as scan with carries alone; trips are not known and counted as `autopar.ir.loops.ASSUMED_ITERATIONS`.
cond: each branch counts with equal probability; results have one layout.

`REGIONS` has the function of each primitive; `region_facts` says who reads the values of one graph, and what is fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from autopar.cost import CostModel
from autopar.ir import Graph, Layout, Operand, Operator, TensorType
from autopar.ir.attention import attention_cores, on_chip_operators
from autopar.ir.layer_loops import replaced_in_place, sliced_inside
from autopar.ir.loops import Scan, While, runs_inside
from autopar.ir.phases import is_stage_loop, phase_of
from autopar.ir.primitives import DENSE_CONTRACTIONS, is_fusible, reads_fused
from autopar.ir.readers import converging
from autopar.search.intra.builder import Builder, is_summable
from autopar.search.intra.sharding_problem import RegionSite, Use
from autopar.search.intra.slices import add_slices_on_the_way
from autopar.search.intra.stage_loops import state_replaced

Port = tuple[int, tuple[Layout, ...]]


@dataclass
class RegionDraft:
    """An operator with regions as it is added: its place, and the layouts of its operands and results so far.

    Args:
        b: where it is added.
        op: the operator.
        prefix: names of the regions around it.
        weight: how often a step it runs.
        inner_weight: how often a step what it takes is taken inside.
        operands: for each operand the node that decides its layout, and the layouts.
        results: likewise for each result.
    """

    b: Builder
    op: Operator
    prefix: str
    weight: float
    inner_weight: float = field(init=False)
    operands: list[Port] = field(default_factory=list)
    results: list[Port] = field(default_factory=list)

    def __post_init__(self) -> None:
        inside = self.op.primitive != "cond"  # what its branches take is taken before one is chosen
        self.inner_weight = runs_inside(self.op, self.weight) if inside else self.weight

    @property
    def id(self) -> str:
        """The operator's name with the regions around it."""
        return self.prefix + self.op.id

    def enter(
        self,
        operand: Operand,
        inner: str,
        type: TensorType,
        *,
        stacked: bool = False,
        layouts: Port | None = None,
        in_place: bool = False,
    ) -> Port:
        """Adds a region's input that takes an operand; (its node, its layouts).

        Args:
            operand: of the operator.
            inner: key of the region's input.
            type: of the region's input.
            stacked: whether each trip takes a slice of the operand.
            layouts: node and layouts of the input, where they are there already.
            in_place: whether the region writes the operand where it lies.
        """
        b = self.b
        node, kinds = layouts or b.free_layouts(inner, type)
        outer = tuple(k.stack() for k in kinds) if stacked else kinds
        source = b.values[self.prefix + operand] if isinstance(operand, str) else None
        if source is not None:
            b.space.same(source.key, inner, first=-1 if stacked else 0)
        if inner not in b.values:
            nested = not self.prefix and not stacked and operand in b.offered.nested
            value = b.value(
                inner, type, node, kinds, self.inner_weight, alias=not stacked,
                trips=type.shape[0] if nested else 1, hosted=(True,) * len(kinds) if nested else (),
            )  # fmt: skip
            # What is made on demand is as much a constant as what is computed from it.
            if source is not None and not stacked and (source.constant or (b.cost.fuses and source.node is None)):
                value.transient = value.constant = True
        if source is not None and source.node is not None:
            there = not self.prefix and source.key in b.offered.nested
            taken = Use(node, tuple(outer), self.weight, b.time, self.id, b.phase, stacked, there=there)
            b.use(source.key, taken)
            if in_place or (stacked and source.alias and self.prefix in b.stage_bodies):
                # Where it is written it lies as it is taken; what a stage's loop takes is laid out before the loop.
                source.uses[-1] = replace(source.uses[-1], as_made=(True,) * len(outer))
        return node, outer

    def as_it_lies(self, operand: Operand) -> Port | None:
        """The node and layouts of a value that lies on the device in any case; None for all others."""
        source = self.b.values[self.prefix + operand] if isinstance(operand, str) else None
        return None if source is None or source.node is None or source.hosted else (source.node, source.layouts)

    def arriving(self, operand: Operand) -> Port | None:
        """The node and layouts of an operand that comes placed as the region takes it; None for all others."""
        source = self.b.values[self.prefix + operand] if isinstance(operand, str) else None
        return None if source is None or source.node is None or not source.arriving else (source.node, source.layouts)

    def in_rows(self, operand: Operand, inner: str, type: TensorType) -> Port:
        """The node and layouts of a stack that a loop of segments takes whole, and in rows: those of its slices.

        A loop inside of such a loop takes it as it is there.
        """
        source = self.b.values[self.prefix + operand] if isinstance(operand, str) else None
        if source is not None and source.node is not None and source.in_rows:
            return source.node, source.layouts
        node, kinds = self.b.free_layouts(inner, TensorType(type.shape[1:], type.dtype))
        return node, tuple(k.stack() for k in kinds)

    def leave(self, region: Graph, at: int, prefix: str, port: Port, weight: float, *, stacked: bool = False) -> None:
        """The region's output number ``at`` ends in the layouts of ``port``; ``prefix`` is that of the region."""
        operand = region.outputs[at].operand
        if isinstance(operand, str):
            source = self.b.values[prefix + operand]
            self.b.space.same(source.key, self.prefix + self.op.results[at].name, first=int(stacked))
            if source.node is not None:
                taken = Use(port[0], tuple(port[1]), weight, self.b.time, self.id, self.b.phase)
                self.b.use(source.key, taken)

    def extend(self, operands: Collection[int]) -> None:
        """Extends the life of a loop's ``operands``: every trip needs them, so they live until it ends."""
        for i in operands:
            operand = self.op.operands[i]
            source = self.b.values.get(self.prefix + operand) if isinstance(operand, str) else None
            if source is None or source.node is None:
                continue
            node = self.operands[i][0]
            source.uses = [
                replace(u, until=self.b.time, heavy=True) if u.node == node and u.consumer == self.id else u
                for u in source.uses
            ]

    def record(self) -> None:
        """Records the operator itself: its ports have nodes of their own, so the record names them one by one."""
        site = RegionSite(self.id, self.op, tuple(self.operands), tuple(self.results), self.weight, self.b.time)
        self.b.region_sites.append(site)


def scan(region: RegionDraft, walk: WalkGraph, graph: Graph) -> None:
    """Adds a ``scan`` operator and the operators of its body to the integer program.

    Args:
        region: the operator in its place.
        walk: edges from each operator to the readers of its results.
        graph: the graph that has the operator.
    """
    b, op, prefix, weight = region.b, region.op, region.prefix, region.weight
    loop = Scan.of(op)
    body, consts, carries = loop.body, loop.num_consts, loop.num_carry
    begin, inner = b.time, f"{prefix}{op.id}/body/"
    in_place = {i: j for i, j in replaced_in_place(graph, op).items() if region.as_it_lies(op.operands[i])}
    kept = state_replaced(op)
    if is_stage_loop(op):
        b.stage_bodies.add(inner)
    replaces, in_rows = {j: i for i, j in in_place.items()}, sliced_inside(op)
    for i, (operand, entry) in enumerate(zip(op.operands, body.inputs, strict=True)):
        carried = consts <= i < loop.num_whole and is_summable(entry.type)
        layouts = region.arriving(operand) if i < consts else None
        if i in kept.values():  # the update in the loop writes it where it lies
            layouts = region.as_it_lies(operand)
            b.donated |= {inner + entry.name} if operand in b.donated else set()
        elif i in kept:
            layouts = region.operands[kept[i]]
        if i in in_rows:
            layouts = region.in_rows(operand, inner + entry.name, entry.type)
        layouts = layouts or b.free_layouts(inner + entry.name, entry.type, partial=carried)
        stacked = i >= loop.num_whole
        port = region.enter(
            operand, inner + entry.name, entry.type, stacked=stacked, layouts=layouts, in_place=i in in_place
        )
        region.operands.append(port)
        b.values[inner + entry.name].in_rows = i in in_rows
    if loop.length > 1:
        read = {name for inside in body.operators for name in inside.reads}
        read.update(o.operand for o in body.outputs[:carries] if isinstance(o.operand, str))
        stacks = [o.operand for j, o in enumerate(body.outputs) if j >= carries and j not in replaces]
        b.stack_moves.update((inner + i.name, 2) for i in body.inputs[loop.num_whole :])
        b.stack_moves.update((inner + name, 3 if name in read else 1) for name in stacks if isinstance(name, str))
    walk(body, inner, region.inner_weight)
    b.time += 1
    region.extend({*range(consts), *range(loop.num_whole, len(op.operands)), *in_place})
    passes = {phase_of(o, b.phase) for o in body.operators}
    for j, result in enumerate(op.results):
        hosted: tuple[bool, ...] = ()
        trips = 1
        if j < carries:
            node, kinds = region.operands[consts + j]
            outer = kinds
        elif j in replaces:
            node, outer = region.operands[replaces[j]]
            kinds = tuple(k.slice() for k in outer)
        else:
            type, name = body.outputs[j].type, prefix + result.name
            if name in b.offered.stacks:
                node, kinds, hosted = b.free_places(name, type)
                trips = loop.length
            else:
                node, kinds = b.free_layouts(name, type, partial=is_summable(type))
            outer = tuple(k.stack() for k in kinds)
        region.leave(body, j, inner, (node, kinds), region.inner_weight, stacked=j >= carries)
        rows = consts + j in in_rows and j < carries
        written = j in replaces and prefix + str(op.operands[replaces[j]]) in b.donated
        written |= j < carries and str(op.operands[kept.get(consts + j, 0)]) in b.donated and consts + j in kept
        value = b.value(
            prefix + result.name, result.type, node, outer, weight, hosted=hosted, trips=trips, replaced=trips > 1,
            alias=(rows or written) and bool(prefix), in_rows=rows,
        )  # fmt: skip
        # Until then what it replaces is counted, or what the only microbatch makes.
        alone = is_stage_loop(op) and loop.length == 1 and j < carries
        value.time = b.time if written or alone else begin
        if "backward" in passes and j < carries and consts + j not in kept:
            value.phase = "backward"  # sums of gradients
        region.results.append((node, outer))
    region.record()
    add_slices_on_the_way(b, graph, op, prefix, begin)


def while_loop(region: RegionDraft, walk: WalkGraph, graph: Graph) -> None:
    """Adds a ``while`` operator and the operators of its regions to the integer program.

    Args:
        region: the operator in its place.
        walk: edges from each operator to the readers of its results.
        graph: the graph that has the operator.
    """
    b, op, prefix, weight = region.b, region.op, region.prefix, region.weight
    loop = While.of(op)
    cond, body, cond_consts, body_consts = loop.cond, loop.body, loop.cond_consts, loop.body_consts
    trips = region.inner_weight
    in_cond, in_body = f"{prefix}{op.id}/cond/", f"{prefix}{op.id}/body/"
    predicate = cond.outputs[0].type
    for i, operand in enumerate(op.operands):
        if i < cond_consts:
            entry = cond.inputs[i]
            region.operands.append(region.enter(operand, in_cond + entry.name, entry.type))
        elif i < cond_consts + body_consts:
            entry = body.inputs[i - cond_consts]
            region.operands.append(region.enter(operand, in_body + entry.name, entry.type))
        else:
            j = i - cond_consts - body_consts
            entry, seen = body.inputs[body_consts + j], cond.inputs[cond_consts + j]
            whole = None
            if predicate.rank:  # a batch of loops: each stops by itself, which the lowering does on whole values
                whole = (b.node(in_body + entry.name, np.zeros(1), str), (Layout.replicated(entry.type.rank),))
            port = region.enter(operand, in_body + entry.name, entry.type, layouts=whole)
            b.value(in_cond + seen.name, seen.type, port[0], port[1], trips, alias=True)
            region.operands.append(port)
    walk(cond, in_cond, trips)
    decided = b.node(f"{region.id} predicate", np.zeros(1), str)
    region.leave(cond, 0, in_cond, (decided, (Layout.replicated(predicate.rank),)), trips)
    walk(body, in_body, trips)
    b.time += 1
    for j, result in enumerate(op.results):
        port = region.operands[cond_consts + body_consts + j]
        region.leave(body, j, in_body, port, trips)
        b.value(prefix + result.name, result.type, port[0], port[1], weight)
        region.results.append(port)
    region.record()


def cond(region: RegionDraft, walk: WalkGraph, graph: Graph) -> None:
    """Adds a ``cond`` operator (jax's ``switch`` too) and those of its branches to the integer program.

    Args:
        region: the operator in its place.
        walk: edges from each operator to the readers of its results.
        graph: the graph that has the operator.
    """
    b, op, prefix, weight = region.b, region.op, region.prefix, region.weight
    share = runs_inside(op, weight)
    id = region.id
    index = graph.type_of(op.operands[0])
    whole = (b.node(f"{id} index", np.zeros(1), lambda _: "[]"), (Layout.replicated(index.rank),))
    region.enter(op.operands[0], f"{id}/index", index, layouts=whole)
    region.operands.append(whole)
    for operand in op.operands[1:]:
        name = f"{id}/operand.{len(region.operands)}"
        region.operands.append(region.enter(operand, name, graph.type_of(operand)))
    for name, branch in op.regions:
        for port, entry in zip(region.operands[1:], branch.inputs, strict=True):
            b.value(f"{id}/{name}/{entry.name}", entry.type, port[0], port[1], share, alias=True)
        walk(branch, f"{id}/{name}/", share)
    b.time += 1
    for j, result in enumerate(op.results):
        port = b.free_layouts(prefix + result.name, result.type)
        for name, branch in op.regions:
            region.leave(branch, j, f"{id}/{name}/", port, share)
        b.value(prefix + result.name, result.type, port[0], port[1], weight)
        region.results.append(port)
    region.record()


#: Adds the operators of a graph, given names of the enclosing regions and how often a step it runs.
WalkGraph = Callable[[Graph, str, float], None]
Handler = Callable[[RegionDraft, WalkGraph, Graph], None]
REGIONS: Mapping[str, Handler] = MappingProxyType({"scan": scan, "while": while_loop, "cond": cond})


@dataclass(frozen=True)
class RegionFacts:
    """Surroundings of the operators of one graph.

    Args:
        prefix: names of the enclosing regions.
        weight: how often a step the graph runs.
        phases: by id of an operator its part of the step.
        shared: values with several readers, the graph's results counted.
        returned: operands of the graph's results.
        fusible: by value, for each operator that reads it, whether that is elementwise.
        read_fused: values whose readers all compute it as they read it.
        cores: by id, operators of attention cores and whether their mask is causal.
        on_chip: ids of operators whose results stay on the chip.
        widened: products that one conversion to a wider dtype alone reads, and that dtype.
        inner: values that only operators of the forward or backward pass read: no gradients of parameters.
        converging: values that one kernel alone reads, where compilers fuse all of it.
    """

    prefix: str
    weight: float
    phases: Mapping[str, str]
    shared: frozenset[str]
    returned: frozenset[str]
    fusible: Mapping[str, Sequence[bool]]
    read_fused: frozenset[str]
    cores: Mapping[str, bool]
    on_chip: Collection[str]
    widened: Mapping[str, str]
    inner: frozenset[str]
    converging: frozenset[str]

    def fuses(self, op: Operator) -> bool:
        """Whether an elementwise operator is fused into its readers: one elementwise operator reads each result.

        Results of the whole graph are not fused, for they are stored.
        """
        return all(v.name in self.converging or self.fusible.get(v.name) == [True] for v in op.results)

    def returns(self, op: Operator) -> bool:
        """Whether a result of an operator is one of the graph."""
        return not self.returned.isdisjoint([v.name for v in op.results])

    def may_recompute(self, op: Operator) -> bool:
        """Whether each reader of an operator's results, none of them the graph's, can compute them as it reads."""
        return self.read_fused.issuperset([v.name for v in op.results])


def region_facts(
    graph: Graph, prefix: str, weight: float, phase: str, cost: CostModel, on_host: AbstractSet[str]
) -> RegionFacts:
    """Finds the surroundings of the operators of a graph.

    Args:
        graph: the step, or a region of one of its operators.
        prefix: names of the enclosing regions.
        weight: how often a step it runs.
        phase: of the enclosing operator.
        cost: which kernels compilers fuse.
        on_host: ids of operators that run on the host.
    """
    fusible: dict[str, list[bool]] = {}
    read_fused: dict[str, bool] = {}
    readers: dict[str, set[str]] = {}
    returned = frozenset(o.operand for o in graph.outputs if isinstance(o.operand, str))
    kept = set(returned)
    products = DENSE_CONTRACTIONS if cost.fuses_products else frozenset()
    phases: dict[str, str] = {}
    for op in graph.operators:
        phases[op.id] = phase_of(op, phase)
        if phases[op.id] == "update":
            kept.update(op.reads)
        here = op.id not in on_host
        elementwise = here and is_fusible(op)
        reads = here and (elementwise or reads_fused(op) or op.primitive in products)
        for operand in op.reads:
            if operand not in readers:
                fusible[operand], read_fused[operand], readers[operand] = [elementwise], reads, {op.id}
                continue
            fusible[operand].append(elementwise)
            read_fused[operand] = read_fused[operand] and reads
            readers[operand].add(op.id)
    cores = graph.fact(attention_cores) if cost.knows_kernels else {}
    return RegionFacts(
        prefix,
        weight,
        phases,
        shared=frozenset(name for name, ids in readers.items() if len(ids) + (name in returned) > 1),
        returned=returned,
        fusible=fusible,
        read_fused=frozenset(name for name, all_fused in read_fused.items() if all_fused),
        cores=cores,
        on_chip=on_chip_operators(graph, cores) if cost.stack.fused_attention else (),
        widened=graph.fact(_widened) if cost.fuses_products else {},
        inner=frozenset(readers.keys() - kept),
        converging=graph.fact(converging) if cost.fuses_products else frozenset(),
    )


def _widened(graph: Graph) -> dict[str, str]:
    """Products that one conversion to a wider dtype alone reads, and that dtype: XLA makes them in it."""
    makers, readers = graph.producers, Counter(o for op in graph.operators for o in op.operands if isinstance(o, str))
    readers.update(o.operand for o in graph.outputs if isinstance(o.operand, str))
    dtypes: dict[str, str] = {}
    for op in graph.operators:
        (operand, *_), maker = op.operands or ("",), None
        if op.primitive == "convert_element_type" and isinstance(operand, str) and readers[operand] == 1:
            maker = makers.get(operand)
        if maker is not None and maker.primitive in DENSE_CONTRACTIONS:
            (product,), (result,) = maker.results, op.results
            if result.type.nbytes > product.type.nbytes:
                dtypes[product.name] = result.type.dtype
    return dtypes
