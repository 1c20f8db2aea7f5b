"""What the operators of a step do in any plan: work that no microbatch, stage, recomputation or fusion spares.

Every operator runs on some devices, split or repeated, but never less than once. Those that compilers do not fuse go by
memory and start a kernel. Of those that they fuse into their readers it is sure only where the result is one of the
step, or is read by an operator that takes its operands from memory and depends on more than constants. Each parameter
and each moment that an update returns in another value is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from autopar.cost import (
    ATTENTIONS,
    PRODUCTS,
    CostModel,
    LeastWork,
    kind_of,
    matrices_of,
    operator_bytes,
    operator_flops,
)
from autopar.cost.kernels import CAUSAL
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.analysis import live
from autopar.ir.attention import attention_cores
from autopar.ir.blockwise import find
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator, reads_fused
from autopar.search.intra.fusion import CONSTANT_BYTES


@dataclass(frozen=True)
class SureWork:
    """One operator's work.

    Args:
        least: of one run.
        runs: in a step, at least.
        phase: that it is in.
        id: of the operator, after those of the loops that it is in.
    """

    least: LeastWork
    runs: float
    phase: str
    id: str = ""


@dataclass(frozen=True)
class _Around:
    """What holds for all operators of one graph.

    Args:
        graph: the step or a body.
        cost: what things cost.
        runs: of the graph in a step.
        enclosing: phase of the operator whose body it is.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        solid_inputs: inputs that are more than constants.
        is_step: whether results of the graph are those of the step.
        prefix: ids of the loops around it.
    """

    graph: Graph
    cost: CostModel
    runs: float
    enclosing: str
    block_scores: int
    solid_inputs: Set[str]
    is_step: bool
    prefix: str = ""


def sure_works(graph: Graph, cost: CostModel, block_scores: int = 0) -> Iterator[SureWork]:
    """The work of a step that is done in any plan.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cost: says what compilers fuse.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
    """
    solid = {i.name for i in graph.inputs if i.type.nbytes > CONSTANT_BYTES}
    yield from _works(_Around(graph, cost, 1.0, "update", block_scores, solid, is_step=True))


def _works(around: _Around) -> Iterator[SureWork]:
    graph, cost = around.graph, around.cost
    needed = live(graph.operators, (o.operand for o in graph.outputs))
    cores = _cores(around)
    returned = {o.operand for o in graph.outputs} if around.is_step else set()
    stored = returned | _read_from_memory(needed, cost, cores)
    values = _Values({i.name: i.type.nbytes for i in graph.inputs if i.name in around.solid_inputs})
    reads = _StateReads({i.name: i.type for i in graph.inputs} if around.is_step else {})
    for op in needed:
        phase, types = phase_of(op.scope, around.enclosing), graph.operand_types(op)
        values.note(op, types, spared=op.id in cores)
        if op.regions:
            yield from _inside(around, op, phase, values.solid)
        elif not is_generator(op) and op.primitive not in ALIASES:
            reads.note(op, types)
            least = _least(op, types, cost, values, cores)
            if is_fusible(op):
                names = {v.name for v in op.results}
                if names.isdisjoint(stored) or not (values.depends(op) or names & returned):
                    continue
                more = 0.0
                if cost.fuses and names & returned and phase == "update":
                    more = reads.bytes_for(op)
                elif cost.fuses and not cost.fuses_products and phase != "update":
                    more = values.read_bytes(op)
                least = replace(least, bytes=least.bytes + more)
            if least.flops or least.bytes:
                yield SureWork(least, around.runs, phase, around.prefix + op.id)


def _inside(around: _Around, op: Operator, phase: str, solid: Set[str]) -> Iterator[SureWork]:
    """What the body of a loop does."""
    if op.primitive not in ("scan", "while"):
        return
    body, runs, inputs = op.region("body"), around.runs, set[str]()
    if op.primitive == "scan":
        runs *= Scan.of(op).length
        pairs = zip(body.inputs, op.operands, strict=True)
        inputs = {i.name for i, o in pairs if o in solid and i.type.nbytes > CONSTANT_BYTES}
    inner = replace(around, graph=body, runs=runs, enclosing=phase, solid_inputs=inputs, is_step=False)
    yield from _works(replace(inner, prefix=f"{around.prefix}{op.id}/"))


def _cores(around: _Around) -> Collection[str]:
    """Operators of attention that one kernel, or blocks, may spare."""
    ids: set[str] = set()
    if around.cost.knows_kernels and around.cost.stack.fused_attention:
        ids |= attention_cores(around.graph).keys()
    if around.block_scores:
        ids = ids.union(attention_cores(around.graph), *(c.inside for c in find(around.graph, around.block_scores)))
    return ids


def _read_from_memory(needed: Sequence[Operator], cost: CostModel, cores: Collection[str]) -> set[object]:
    """Values that an operator takes from memory, and not as it computes them."""
    if cost.fuses_products:  # inside of products, and of what converges in one kernel
        return set()
    fused = reads_fused if cost.fuses else is_fusible
    return {o for op in needed if not fused(op) and op.id not in cores for o in op.reads}


def _least(
    op: Operator, types: Sequence[TensorType], cost: CostModel, values: _Values, cores: Collection[str]
) -> LeastWork:
    """The work of one run of an operator that goes by memory.

    Args:
        op: the operator.
        types: of its operands.
        cost: says what compilers fuse.
        values: those before it.
        cores: operators that may be spared but for their products.
    """
    dtypes = tuple(sorted({t.dtype for t in types} | {v.type.dtype for v in op.results}))
    flops = operator_flops(op, types)
    if op.primitive in ATTENTIONS:
        return LeastWork(CAUSAL * flops, 0.0, dtypes)
    if op.id in cores:
        return LeastWork(CAUSAL * flops if op.primitive in PRODUCTS else 0.0, 0.0, dtypes, starts=False)
    if op.primitive in PRODUCTS:
        shapes, width = [t.shape for t in types], types[0].nbytes // max(1, types[0].size)
        product = matrices_of(op, shapes, op.results[0].type.shape, width)
        return LeastWork(flops, operator_bytes(op, types), dtypes, kind_of(op, types), product)
    if not is_fusible(op) and not (cost.fuses and reads_fused(op)):
        return LeastWork(flops, operator_bytes(op, types), dtypes)
    results = sum(v.type.nbytes for v in op.results)
    if not cost.fuses:
        read = {o: t.nbytes for o, t in zip(op.operands, types, strict=True) if o in values.in_memory}
        return LeastWork(flops, float(results + sum(read.values())), dtypes)
    # What elementwise operators read others may have read; on TPU a sum may be taken as its operand is made.
    more = 0.0 if is_fusible(op) or cost.fuses_products else values.read_bytes(op)
    return LeastWork(flops, results + more, dtypes)


class _Values:
    """What is known of the values of one graph, whatever is fused.

    A kernel reads what it is computed from as far back as that lies in memory: of an elementwise chain of one size at
    least the smallest value on the way. ``least_read`` has the bytes of it, by value.

    Args:
        inputs: bytes of the inputs that lie in memory.
    """

    def __init__(self, inputs: dict[str, int]) -> None:
        self.solid = {n for n, nbytes in inputs.items() if nbytes > CONSTANT_BYTES}
        self.in_memory = set(inputs)
        self.least_read = dict(inputs)

    def depends(self, op: Operator) -> bool:
        """Whether more than constants decides the results of an operator."""
        return not self.solid.isdisjoint(op.reads)

    def read_bytes(self, op: Operator) -> float:
        """Bytes that a kernel reads at least that ends in an operator."""
        return float(max((self.least_read.get(o, 0) for o in op.reads), default=0))

    def note(self, op: Operator, types: Sequence[TensorType], *, spared: bool) -> None:
        """Notes the results of an operator; ``spared`` says that they may never be stored, nor made."""
        if spared or is_generator(op):
            return
        if self.depends(op) or not is_fusible(op):
            self.solid |= {v.name for v in op.results if v.type.nbytes > CONSTANT_BYTES}
        for v in op.results:
            if not is_fusible(op):
                self.in_memory.add(v.name)
                self.least_read[v.name] = v.type.nbytes
                continue
            pairs = zip(op.operands, types, strict=True)
            of_its_size = [self.least_read.get(o, 0) for o, t in pairs if isinstance(o, str) and t.size == v.type.size]
            self.least_read[v.name] = min(v.type.nbytes, max(of_its_size, default=0))


class _StateReads:
    """Inputs of a step that elementwise operators make others of the same size of; each is read once at least.

    Args:
        inputs: types by name; none of bodies.
    """

    def __init__(self, inputs: dict[str, TensorType]) -> None:
        self.inputs = inputs
        self.reached: dict[str, frozenset[str]] = {
            name: frozenset({name}) for name, type in inputs.items() if type.nbytes > CONSTANT_BYTES
        }
        self.counted: set[str] = set()

    def note(self, op: Operator, types: Sequence[TensorType]) -> None:
        """Notes which inputs the results of an operator are computed from, element by element."""
        if not is_fusible(op):
            return
        size = max((v.type.size for v in op.results), default=0)
        from_: set[str] = set()
        for o, t in zip(op.operands, types, strict=True):
            if isinstance(o, str) and t.size == size:
                from_ |= self.reached.get(o, frozenset())
        for v in op.results:
            if v.type.size == size and from_:
                self.reached[v.name] = frozenset(from_)

    def bytes_for(self, op: Operator) -> float:
        """Bytes of the inputs that a returned operator needs and no other has counted."""
        needed = {n for v in op.results for n in self.reached.get(v.name, frozenset())} - self.counted
        self.counted |= needed
        return float(sum(self.inputs[n].nbytes for n in needed))
