"""Work of a step's operators in any plan: no microbatch, stage, recomputation or fusion spares it.

Every operator runs on some devices, split or repeated, but never less than once. Those that compilers do not fuse go by
memory and start a kernel. Of those that they fuse into their readers it is sure only where the result is one of the
step, is carried from trip to trip of a loop, is read by an operator that takes its operands from memory and depends on
more than constants, or is read by several kernels of one pass that do not compute it again
(`autopar.search.stored_values`). Where nothing is fused all are. Each parameter and each moment that an update returns
in another value is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.cluster import ConvolutionForm
from autopar.cost import (
    ATTENTIONS,
    PRODUCTS,
    CostModel,
    LeastWork,
    ProductDims,
    is_dilated,
    kind_of,
    met_share,
    operator_bytes,
    operator_flops,
    product_dtype,
)
from autopar.cost.kernels import CAUSAL
from autopar.ir import Graph, Operator, TensorType, item_bytes
from autopar.ir.analysis import dependents, live
from autopar.ir.attention import attention_cores
from autopar.ir.blockwise import find
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, FACTORIZATIONS, is_fusible, is_generator, reads_fused
from autopar.microbatch import batch_size
from autopar.search.intra.fusion import CONSTANT_BYTES
from autopar.search.stored_values import StateReads, Values, floors, floors_of_inputs, passed_on, shared_results


@dataclass(frozen=True)
class SureWork:
    """One operator's work.

    Args:
        least: of one run.
        runs: in a step, at least.
        phase: that it is in.
        id: of the operator, after those of the loops that it is in.
        loop: id of the outermost of these loops, or "".
        stacks: whether it may run on a stack of matrices, with others that are equal: factorizations, and products in
            loops of the update (`autopar.lower.batched_matrices`).
    """

    least: LeastWork
    runs: float
    phase: str
    id: str = ""
    loop: str = ""
    stacks: bool = False

    @property
    def outermost(self) -> str:
        """Id of the operator of the step that it is, or is inside of."""
        return self.loop or self.id


@dataclass(frozen=True)
class _Around:
    """Facts that hold for all operators of one graph.

    Args:
        graph: the step or a body.
        cost: what things cost.
        runs: of the graph in a step.
        enclosing: phase of the operator whose body it is.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        in_stages: whether operators may be on several stages.
        solid_inputs: inputs that are more than constants.
        floor: of inputs, see `autopar.search.stored_values.floors`.
        is_step: whether results of the graph are those of the step.
        parts: devices times examples: no operator is split in more.
        written: of the body of a loop, results that each of its trips stores: those that the next trip takes, and
            slices of what an operator of the same pass takes from memory.
        carried: those of them that the next trip takes.
        loops: runs in a step of the loop whose body the graph is.
        prefix: ids of the loops around it.
        loop: id of the outermost of them, or "".
    """

    graph: Graph
    cost: CostModel
    runs: float
    enclosing: str
    block_scores: int
    in_stages: bool
    solid_inputs: Set[str]
    floor: Mapping[str, float]
    is_step: bool
    parts: int
    written: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    loops: float = 0.0
    prefix: str = ""
    loop: str = ""


def sure_works(graph: Graph, cost: CostModel, block_scores: int = 0, *, in_stages: bool = True) -> Iterator[SureWork]:
    """The work of a step that is done in any plan.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cost: says what compilers fuse.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        in_stages: whether plans of several stages are among them.
    """
    solid = {i.name for i in graph.inputs if i.type.nbytes > CONSTANT_BYTES}
    floor = {i.name: i.type.nbytes for i in graph.inputs}
    parts = cost.cluster.num_devices * (batch_size(graph) or 1)
    yield from _works(_Around(graph, cost, 1.0, "update", block_scores, in_stages, solid, floor, True, parts))


def forward_share(graph: Graph, cost: CostModel, block_scores: int = 0) -> float:
    """Share of the forward pass in the sure work of a step.

    Args:
        graph: the whole step.
        cost: of the devices.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
    """
    devices, seconds = cost.cluster.num_devices, dict[str, float]()
    for work in sure_works(graph, cost, block_scores):
        seconds[work.phase] = seconds.get(work.phase, 0.0) + work.runs * cost.least_s(work.least, devices)
    return seconds.get("forward", 0.0) / (math.fsum(seconds.values()) or 1.0)


def _works(around: _Around) -> Iterator[SureWork]:
    graph, cost = around.graph, around.cost
    needed = live(graph.operators, (o.operand for o in graph.outputs))
    cores = _cores(around)
    returned = {o.operand for o in graph.outputs} if around.is_step else around.written
    single = passed_on(graph, needed)
    floor = floors(needed, around.floor, single)
    shared = shared_results(graph, floor, cost, cores, around.enclosing, _on_one_stage(around))
    stored_inside = _read_from_memory(needed, cost, cores) | shared.keys()
    stored = returned | stored_inside
    values = Values({i.name: i.type for i in graph.inputs if i.name in around.solid_inputs}, single)
    reads = StateReads({i.name: i.type for i in graph.inputs} if around.is_step else {})
    taken: dict[str, set[object]] = {}  # by phase
    for op in needed:
        phase, types = phase_of(op, around.enclosing), graph.operand_types(op)
        written_in = next((shared[v.name] for v in op.results if v.name in shared), "")
        values.note(op, spared=op.id in cores, written_in=written_in)
        if op.regions:
            if phase not in taken:
                taken[phase] = _stored_for([o for o in needed if phase_of(o, around.enclosing) == phase], cost, cores)
            yield from _inside(around, op, phase, values.solid, floor, taken[phase])
        elif not is_generator(op) and op.primitive not in ALIASES:
            reads.note(op, types)
            least, names = _least(op, types, phase, around, values, cores), {v.name for v in op.results}
            if is_fusible(op):
                if not (values.depends(op) or names & returned) or (cost.fuses and names.isdisjoint(stored)):
                    continue
                more = 0.0
                if names.isdisjoint(stored):
                    more = -float(sum(v.type.nbytes for v in op.results))
                if cost.fuses and names & returned and phase == "update":
                    more += reads.bytes_for(op)
                elif cost.fuses and not cost.fuses_products and phase != "update":
                    more += values.read_bytes(op, types, phase)
                least = replace(least, bytes=least.bytes + more)
            if least.flops or least.bytes:
                stacks = op.primitive in FACTORIZATIONS or (bool(around.loop) and phase == "update")
                # What the last trip makes nobody may have to store.
                last = is_fusible(op) and names.isdisjoint(stored_inside) and not names.isdisjoint(around.carried)
                runs = around.runs - around.loops * last
                yield SureWork(least, runs, phase, around.prefix + op.id, around.loop, stacks)


def _on_one_stage(around: _Around) -> Collection[str] | None:
    """Ids of operators that no two stages of a pipeline run; None for those of a loop, which is on one as it is."""
    if not around.is_step or not around.in_stages:
        return None
    graph = around.graph
    return {op.id for op in dependents(graph.operators, [i.name for i in graph.inputs if i.role == "batch"])}


def _inside(
    around: _Around, op: Operator, phase: str, solid: Set[str], floor: Mapping[str, float], taken: Set[object]
) -> Iterator[SureWork]:
    """Work of the body of a loop, of whose results operators of its pass take some from memory."""
    if op.primitive not in ("scan", "while"):
        return
    body, runs, inputs, floor_inside = op.region("body"), around.runs, set[str](), dict[str, float]()
    written = carried = frozenset[str]()
    if op.primitive == "scan":
        scan, floor_inside = Scan.of(op), floors_of_inputs(op, floor)
        runs *= scan.length
        if around.cost.fuses and not around.cost.fuses_products:  # others may write it as a product is computed
            results = [str(o.operand) for o in body.outputs]
            carried = frozenset(results[: scan.num_carry])
            slices = zip(results[scan.num_carry :], op.results[scan.num_carry :], strict=True)
            written = carried.union(name for name, v in slices if v.name in taken)
        pairs = zip(body.inputs, op.operands, strict=True)
        inputs = {i.name for i, o in pairs if o in solid and i.type.nbytes > CONSTANT_BYTES}
    inner = replace(around, graph=body, runs=runs, enclosing=phase, solid_inputs=inputs, floor=floor_inside)
    inner = replace(inner, is_step=False, written=written, carried=carried, loops=around.runs)
    yield from _works(replace(inner, prefix=f"{around.prefix}{op.id}/", loop=around.loop or op.id))


def _cores(around: _Around) -> Collection[str]:
    """Operators of attention that one kernel, or blocks, may spare."""
    ids: set[str] = set()
    if around.cost.knows_kernels and around.cost.stack.fused_attention:
        ids |= around.graph.fact(attention_cores).keys()
    if around.block_scores:
        ids = ids.union(
            around.graph.fact(attention_cores), *(c.inside for c in find(around.graph, around.block_scores))
        )
    return ids


def _read_from_memory(needed: Iterable[Operator], cost: CostModel, cores: Collection[str]) -> set[object]:
    """Values that an operator takes from memory, and not as it computes them."""
    if cost.fuses_products:  # inside of products, and of what converges in one kernel
        return set()
    fused = reads_fused if cost.fuses else is_fusible
    return {o for op in needed if not fused(op) and op.id not in cores for o in op.reads}


def _stored_for(pass_: Sequence[Operator], cost: CostModel, cores: Collection[str]) -> set[object]:
    """Values that some operator of a pass reads from memory, itself or through operators that are fused into it.

    Stacked results of a loop are stored before an operator reads them.

    Args:
        pass_: operators of one pass, in order.
        cost: says what compilers fuse.
        cores: operators of attention that may be spared.
    """
    stored = _read_from_memory(pass_, cost, cores)
    for op in reversed(pass_):
        if not stored.isdisjoint(v.name for v in op.results):
            stored.update(op.reads)
    return stored


def _least(
    op: Operator, types: Sequence[TensorType], phase: str, around: _Around, values: Values, cores: Collection[str]
) -> LeastWork:
    """The work of one run of an operator that goes by memory.

    Args:
        op: the operator.
        types: of its operands.
        phase: that it is in.
        around: facts of its graph.
        values: those before it.
        cores: operators that may be spared but for their products.
    """
    cost = around.cost
    named = {t.dtype for t in types} | {v.type.dtype for v in op.results}
    if op.primitive in PRODUCTS | ATTENTIONS:
        named = {product_dtype(op, dtype) for dtype in named}
    dtypes, flops = tuple(sorted(named)), operator_flops(op, types)
    if op.primitive in ATTENTIONS:
        return LeastWork(CAUSAL * flops, 0.0, dtypes)
    if op.id in cores:
        return LeastWork(CAUSAL * flops if op.primitive in PRODUCTS else 0.0, 0.0, dtypes, starts=False)
    if op.primitive in PRODUCTS:
        width, kind, result = item_bytes(types[0].dtype), kind_of(op, types), op.results[0].type.shape
        dims = ProductDims.of(op, [t.shape for t in types], result)
        assert dims is not None
        product, aligned = dims.matrices(width), dims.aligned(width, around.parts)
        work = LeastWork(flops, operator_bytes(op, types), dtypes, kind, product, aligned)
        if not kind:
            return work
        form: ConvolutionForm = "dilated" if is_dilated(op) else "windows"
        share = met_share(op, [t.shape for t in types], result)
        return replace(work, spatial_dims=len(result) - 2, form=form, met_share=share)
    if not is_fusible(op) and not (cost.fuses and reads_fused(op)):
        return LeastWork(flops, operator_bytes(op, types), dtypes)
    results = sum(v.type.nbytes for v in op.results)
    if not cost.fuses:
        pairs = zip(op.operands, types, strict=True)
        read = {o: t.nbytes for o, t in pairs if isinstance(o, str) and values.in_memory_for(o, phase)}
        return LeastWork(flops, float(results + sum(read.values())), dtypes)
    # What elementwise operators read others may have read; on TPU a sum may be taken as its operand is made.
    more = 0.0 if is_fusible(op) or cost.fuses_products else values.read_bytes(op, types, phase)
    return LeastWork(flops, results + more, dtypes)
