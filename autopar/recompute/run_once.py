"""`run_once`: operators of the forward pass that a recomputation does not run again though it could.

`jax.checkpoint` and compilers run again what the backward pass reads, and nothing else: the last product of a layer,
and what follows it there, run once. Programs that call the layer's function again run them twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.fingerprint import exact_hash
from autopar.ir.graph import Graph, Literal, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import FORWARD, MICROBATCHES, RECOMPUTED, STAGE, phase_of
from autopar.ir.types import TensorType

#: Passes a value on; a result is its operand.
_BARRIER = "optimization_barrier"
#: What ends a layer after its last product: bias and residual.
_LAYER_ENDS = frozenset({"add", "add_any", "convert_element_type"})


@dataclass(frozen=True)
class _Numbered:
    """An operator with the numbers of what it takes and makes; equal computations of equal types have one number."""

    key: str
    op: Operator
    phase: str
    taken: frozenset[int]
    results: Mapping[str, int]


def run_once(graph: Graph) -> frozenset[str]:
    """Keys of the operators that are in what is recomputed and run once: names of enclosing regions and their own.

    They read what runs again, and the backward pass does not read what they make. Operators of the two runs are paired
    by what they compute. Inputs of loops over layers count by their types: the two runs are in two loops.

    Args:
        graph: a step, or that of a stage.
    """
    operators = list(_numbered(graph, "", "update", {}))
    again = {n for o in operators if RECOMPUTED in o.op.marks for n in o.results.values()}
    left: set[str] = set()
    ends: set[int] = set()
    for o in operators:
        if o.phase != FORWARD or o.op.regions or not o.results or again.intersection(o.results.values()):
            continue
        if again.intersection(o.taken) or (o.op.primitive in _LAYER_ENDS and ends.intersection(o.taken)):
            left.add(o.key)
            ends.update(o.results.values())
    return frozenset(left)


def _numbered(
    graph: Graph, prefix: str, enclosing: str, numbers: dict[Hashable, int], *, given: Mapping[str, int] | None = None
) -> Iterator[_Numbered]:
    """All operators of a graph and of its regions, in running order.

    Masks, indices and what is made of no input count by their types, and are in no `_Numbered`.

    Args:
        graph: a step, or a region of one.
        prefix: names of the enclosing regions.
        enclosing: phase of the operator that the graph is a region of.
        numbers: of all that was seen.
        given: numbers of inputs, where the graph is the body of a loop over layers; others count by their types there.
    """

    def number(form: Hashable) -> int:
        return numbers.setdefault(form, len(numbers))

    known: dict[str, int] = {}
    for i in graph.inputs:
        by_name = given is None and _is_float(i.type)
        known[i.name] = (given or {}).get(i.name, number((prefix, i.name) if by_name else str(i.type)))
    constant: set[str] = set()
    slices: dict[str, int] = {}  # of what loops stack, number of what each trip makes
    for op in graph.operators:
        for name, region in op.regions:
            inside, phase = f"{prefix}{op.id}/{name}/", phase_of(op, enclosing)
            inputs = _slices_taken(op, slices) if given is not None or not _over_microbatches(op) else None
            within = list(_numbered(region, inside, phase, numbers, given=inputs))
            yield from within
            slices |= _slices_made(op, within, inside)
        taken = [number(str(o.type)) if isinstance(o, Literal) else known[o] for o in op.operands]
        form = exact_hash(op, graph.operand_types(op)), tuple(taken)
        is_constant = constant.issuperset(op.reads)
        results: dict[str, int] = {}
        for n, v in enumerate(op.results):
            if is_constant or not _is_float(v.type):
                known[v.name] = number(str(v.type))
                constant.update([v.name] if is_constant else ())
            elif op.primitive == _BARRIER:
                known[v.name] = taken[n]
            else:
                results[v.name] = known[v.name] = number((form, n))
        reads = frozenset(known[o] for o in op.reads if o not in constant)
        yield _Numbered(prefix + op.id, op, phase_of(op, enclosing), reads, results)


def _over_microbatches(op: Operator) -> bool:
    return not {MICROBATCHES, STAGE}.isdisjoint(op.marks)


def _slices_taken(op: Operator, slices: Mapping[str, int]) -> dict[str, int]:
    """Numbers of inputs of a loop's body that are slices of what an earlier loop stacked."""
    if op.primitive != "scan":
        return {}
    inputs = zip(op.region("body").inputs, op.operands, strict=True)
    stacked = list(inputs)[Scan.of(op).num_whole :]
    return {i.name: slices[o] for i, o in stacked if isinstance(o, str) and o in slices}


def _slices_made(op: Operator, within: Sequence[_Numbered], prefix: str) -> dict[str, int]:
    """Numbers of what each trip of a loop adds to what it stacks."""
    if op.primitive != "scan":
        return {}
    results = {name: n for o in within if o.key == prefix + o.op.id for name, n in o.results.items()}
    carried, body = Scan.of(op).num_carry, op.region("body")
    stacked = list(zip(op.results, body.outputs, strict=True))[carried:]
    return {v.name: results[o.operand] for v, o in stacked if isinstance(o.operand, str) and o.operand in results}


def _is_float(type: TensorType) -> bool:
    return type.dtype.startswith(("f", "bf"))
