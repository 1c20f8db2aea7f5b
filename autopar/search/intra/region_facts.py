"""Surroundings of the operators of one graph: readers of their results, and operators that compilers fuse with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autopar.cost import CostModel
from autopar.ir import Graph, Operator
from autopar.ir.attention import attention_cores, on_chip_operators
from autopar.ir.phases import phase_of
from autopar.ir.primitives import DENSE_CONTRACTIONS, is_fusible, reads_fused
from autopar.ir.readers import converging


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
        """Whether results of an elementwise operator, none of them the graph's, go to one elementwise reader each."""
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
    cores = attention_cores(graph) if cost.knows_kernels else {}
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
        widened=_widened(graph) if cost.fuses_products else {},
        inner=frozenset(readers.keys() - kept),
        converging=converging(graph) if cost.fuses_products else frozenset(),
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
