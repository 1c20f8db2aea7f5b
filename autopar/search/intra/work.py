"""The work of one operator in its place: what its neighbours spare it, and what its operands' order adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.cost import (
    ATTENTIONS,
    PRODUCTS,
    CostModel,
    KernelWork,
    Matrices,
    convolution_of,
    matrices_of,
    met_share,
    packed,
    product_dtype,
    reorders,
)
from autopar.ir import Graph, Literal, Operator, TensorType, item_bytes
from autopar.ir.primitives import TRANSCENDENTAL, is_fusible
from autopar.ir.transposed_products import transposed_products
from autopar.search.intra.attention import AttentionSite
from autopar.search.intra.operators import OperatorOptions
from autopar.search.intra.sharding_problem import ValueDraft
from autopar.sharding import Strategy


class Chains:
    """Reads of a fusion that computes a value of one graph: XLA's for CPUs pulls in all cheap operators before it.

    Args:
        graph: operators and who reads what.
    """

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.producers
        self.types = graph.types
        self.shared: set[str] = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
        taken: set[str] = set()
        for op in graph.operators:
            names = set(op.reads)
            self.shared |= names & taken
            taken |= names
        #: Ids of products whose programs have swapped operands.
        self.swapped = frozenset(graph.fact(transposed_products))

    def read_bytes(self, name: str) -> float:
        """Bytes of what lies in memory that a value is computed from, no more of each than the value has itself."""
        most = self.types[name].nbytes
        seen, left, total = {name}, [name], 0.0
        while left:
            at = left.pop()
            op = self.makers.get(at)
            stored = op is None or not is_fusible(op) or (op.primitive in TRANSCENDENTAL and at in self.shared)
            if op is None or stored:
                total += min(most, self.types[at].nbytes)
                continue
            fresh = set(op.reads) - seen
            seen |= fresh
            left.extend(fresh)
        return total


def moved_bytes(
    op: Operator,
    operand_types: Sequence[TensorType],
    sources: Sequence[ValueDraft | None],
    options: OperatorOptions,
    fusable: bool,
) -> float:
    """Bytes that an operator reads and writes; an elementwise one is one kernel with those that fuse with it.

    Args:
        op: the operator.
        operand_types: types of its operands.
        sources: its operands; None for literals.
        options: of the operator.
        fusable: whether its results are never stored.
    """
    if not is_fusible(op):
        return options.bytes
    read = (
        t.nbytes
        for t, s in zip(operand_types, sources, strict=True)
        if s is not None and s.node is not None and not s.fused
    )
    return float(sum(read) + (0 if fusable else sum(v.type.nbytes for v in op.results)))


def stored_of(source: ValueDraft | None) -> frozenset[str]:
    """Keys of the values in memory that a kernel reads to have ``source``; none for what is made on demand."""
    if source is None or source.node is None:
        return frozenset()
    return source.stored if source.transient else frozenset({source.key})


def kernel_bytes(
    op: Operator, operand_types: Sequence[TensorType], stored: Sequence[TensorType], transient: bool
) -> float:
    """Bytes that the kernel reads and writes which ends in an elementwise operator or a sum; 0 if it goes on.

    Compilers for accelerators compute cheap values again in every kernel that reads them, so that a kernel reads what
    lies in memory, each value once, whatever is computed from it on the way.

    Args:
        op: the operator.
        operand_types: types of its operands.
        stored: types of the values in memory that they are computed from.
        transient: whether its results are never stored.
    """
    if transient:
        return 0.0
    # Of what is sliced no more is read than is taken.
    most = max((t.size for t in (*operand_types, *(v.type for v in op.results))), default=0)
    read = sum(min(t.size, most) * t.nbytes / max(1, t.size) for t in stored)
    return float(read + sum(v.type.nbytes for v in op.results))


def dtype_of(op: Operator, operand_types: Sequence[TensorType]) -> str:
    """Dtype that an operator computes in."""
    first = operand_types[0] if operand_types else op.results[0].type if op.results else None
    if first is None:
        return "f32"
    return product_dtype(op, first.dtype) if op.primitive in PRODUCTS | ATTENTIONS else first.dtype


def with_order(
    work: KernelWork,
    op: Operator,
    operand_types: Sequence[TensorType],
    chains: Chains | None,
    functions: frozenset[str],
) -> KernelWork:
    """The work of one run of an operator with its functions, and with operands that are brought into another order.

    Args:
        work: without them.
        op: the operator.
        operand_types: types of its operands.
        chains: of the operator's graph; None where the order of operands takes no time.
        functions: primitives whose elements some device counts.
    """
    if op.primitive in functions:
        return replace(work, function=op.primitive, elements=sum(v.type.size for v in op.results))
    if chains is None:
        return work
    swapped = op.id in chains.swapped
    by_compiler = reorders(op, operand_types, swapped=swapped)
    by_library = packed(op, operand_types, swapped=swapped)
    read = [_read_bytes(op.operands[r.operand], chains) for r in by_compiler]
    read += [float(operand_types[r.operand].nbytes) for r in by_library]
    every = (*by_compiler, *by_library)
    reordered = tuple((bytes, r.stride_bytes) for bytes, r in zip(read, every, strict=True))
    return replace(work, reordered=reordered, copied=tuple(r.operand for r in every))


def _read_bytes(operand: str | Literal, chains: Chains) -> float:
    return 0.0 if isinstance(operand, Literal) else chains.read_bytes(operand)


def product_of(op: Operator, types: Sequence[TensorType], strategy: Strategy, sizes: Mapping[str, int]) -> Matrices:
    """The matrix products that a product or convolution is on one device.

    Args:
        op: the operator, one of `autopar.cost.PRODUCTS`.
        types: types of its operands.
        strategy: how it is split.
        sizes: of the mesh's axes.
    """
    shapes = [k.local_shape(t.shape, sizes) for k, t in zip(strategy.operand_layouts, types, strict=True)]
    result = strategy.result_layouts[0].local_shape(op.results[0].type.shape, sizes)
    product = matrices_of(op, shapes, result, item_bytes(types[0].dtype))
    assert product is not None
    return product


def busy_seconds(
    cost: CostModel,
    mesh: LogicalMesh,
    work: KernelWork,
    strategies: Sequence[Strategy],
    op: Operator,
    types: Sequence[TensorType],
) -> NDArray[np.float64]:
    """Busy seconds of one run of an operator, by strategy.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        work: what the operator does.
        strategies: its strategies.
        op: the operator.
        types: types of its operands.
    """
    sizes = mesh.sizes
    joined = _joining_s(cost, sizes, strategies, types) if any(s.exchanges for s in strategies) else 0.0
    if op.primitive in ATTENTIONS:
        return np.array([AttentionSite(cost, mesh, s, op, types).seconds for s in strategies])
    if op.primitive in PRODUCTS and cost.knows_kernels:
        each = [product_of(op, types, s, sizes) for s in strategies]
        batch, m, n, k, elements = np.array([(p.batch, p.m, p.n, p.k, p.elements) for p in each], float).T
        sized = Matrices(batch, m, n, k, each[0].width, elements, each[0].done)
        return np.asarray(cost.product_s(sized, dtype_of(op, types), work.core, backward=work.backward)) + joined
    if work.kind and cost.measures_convolutions:
        met = met_share(op, [t.shape for t in types], op.results[0].type.shape)
        works = [_of_sizes(_of_strategy(work, s, types, sizes), op, s, types, sizes, met) for s in strategies]
        by_work = {(w, s.split): 0.0 for w, s in zip(works, strategies, strict=True)}
        by_work = {(w, n): cost.work_s(w, n) for w, n in by_work}
        return np.array([by_work[w, s.split] for w, s in zip(works, strategies, strict=True)]) + joined
    if work.reordered:
        return np.array([cost.work_s(_of_strategy(work, s, types, sizes), s.split) for s in strategies]) + joined
    by_split = {n: cost.work_s(work, n) for n in sorted({s.split for s in strategies})}
    return np.array([by_split[s.split] for s in strategies]) + joined


def _of_sizes(
    work: KernelWork,
    op: Operator,
    strategy: Strategy,
    types: Sequence[TensorType],
    sizes: Mapping[str, int],
    met: float,
) -> KernelWork:
    """Work of a convolution with its sizes on one device; ``met`` of the whole, see `met_share`."""
    shapes = [k.local_shape(t.shape, sizes) for k, t in zip(strategy.operand_layouts, types, strict=True)]
    result = strategy.result_layouts[0].local_shape(op.results[0].type.shape, sizes)
    edges = {e.dim for e in strategy.exchanges if e.operand == 0}
    return replace(work, convolution=convolution_of(op, shapes, result, met_share=met, edges=edges))


def _of_strategy(
    work: KernelWork, strategy: Strategy, types: Sequence[TensorType], sizes: Mapping[str, int]
) -> KernelWork:
    """Work of which a device does one of the strategy's parts: it copies its pieces of operands, which may be whole."""
    layouts = strategy.operand_layouts
    shares = [layouts[n].local_bytes(types[n], sizes) / max(1, types[n].nbytes) for n in work.copied]
    copies = zip(work.reordered, shares, strict=True)
    return replace(work, reordered=tuple((bytes * s * strategy.split, stride) for (bytes, stride), s in copies))


def _joining_s(
    cost: CostModel, sizes: Mapping[str, int], strategies: Sequence[Strategy], types: Sequence[TensorType]
) -> NDArray[np.float64]:
    """Seconds in which a device puts pieces and their neighbours' edges together, which are read as one array."""

    def of(s: Strategy) -> float:
        operands = sorted({e.operand for e in s.exchanges})
        moved = [2.0 * s.operand_layouts[i].local_bytes(types[i], sizes) for i in operands]
        return sum(cost.operator_s(0.0, bytes, types[i].dtype) for i, bytes in zip(operands, moved, strict=True))

    return np.array([of(s) for s in strategies])
