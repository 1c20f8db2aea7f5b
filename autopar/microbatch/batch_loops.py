"""`loops_over_batch`: loops that a step has over parts of its batch, whose iterations need nothing of each other.

Users write them to accumulate gradients: `jax.lax.scan` or `jax.lax.map` over ``x.reshape(4, -1, ...)``, or
`jax.lax.fori_loop` that reads ``parts[i]``. An iteration may add to what the loop carries, leave it as it is, or count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Layout, Literal, Operand, Operator
from autopar.ir.loops import Scan
from autopar.microbatch.analyze import examples, forward_states
from autopar.microbatch.base import pseudo_mesh
from autopar.microbatch.inside import MicrobatchAxis, before_barriers, is_sum


@dataclass(frozen=True)
class BatchLoop:
    """A loop over parts of the batch.

    Args:
        sums: numbers of the carries that iterations add to.
        counters: numbers of the carries that are the number of the iteration.
        reads: by id of an operator of the body that reads the part of its number, the number of the constant that has
            all parts.
    """

    sums: frozenset[int]
    counters: frozenset[int]
    reads: dict[str, int]


def loops_over_batch(graph: Graph) -> dict[str, BatchLoop]:
    """Loops over parts of the batch by id.

    Args:
        graph: a traced train step with roles.
    """
    scans = {op.id: op for op in graph.operators if op.primitive == "scan" and not op.effects}
    loops = {id: loop for id, op in scans.items() if (loop := _independent(op)) is not None}
    over_batch: dict[str, BatchLoop] = {}
    for length in sorted({Scan.of(scans[id]).length for id in loops} - {1}):
        batch = examples(graph, length, 0)
        if batch is None:
            continue
        states = forward_states(graph, batch, MicrobatchAxis(pseudo_mesh(length)), frozenset()).values
        for id, loop in loops.items():
            if Scan.of(scans[id]).length == length and _takes_examples(scans[id], loop, states):
                over_batch[id] = loop
    return over_batch


def _takes_examples(op: Operator, loop: BatchLoop, states: dict[str, Layout]) -> bool:
    """Whether microbatches split the dim that a loop goes over, of what it takes part by part."""
    consts, _, stacks = Scan.of(op).split(op.operands)
    parts = [*stacks, *(consts[n] for n in loop.reads.values())]
    layouts = [states[o] for o in parts if isinstance(o, str) and o in states]
    return any(k.dims[0] for k in layouts)


def _independent(op: Operator) -> BatchLoop | None:
    """The loop, with the kinds of its carries; None where an iteration needs results of another."""
    scan = Scan.of(op)
    sums, counters = set(), set()
    _, initial, _ = scan.split(op.operands)
    for n in range(scan.num_carry):
        given, result, first = scan.num_consts + n, scan.body.outputs[n].operand, initial[n]
        if before_barriers(scan.body, result) == scan.body.inputs[given].name:
            continue
        if _is_counter(scan.body, given, result) and isinstance(first, Literal) and first.is_zero:
            counters.add(n)
        elif is_sum(scan.body, given, n):
            sums.add(n)
        else:
            return None
    if counters and op.attr("reverse"):
        return None  # parts are counted from the last one
    numbers = {scan.body.inputs[scan.num_consts + n].name for n in counters}
    return BatchLoop(frozenset(sums), frozenset(counters), _reads(scan, numbers))


def _is_counter(body: Graph, given: int, result: Operand) -> bool:
    """Whether a carry is one more after each iteration."""
    producer = body.producers.get(result) if isinstance(result, str) else None
    if producer is None or producer.primitive != "add" or body.inputs[given].type.shape:
        return False
    others = [o for o in producer.operands if o != body.inputs[given].name]
    return len(others) == 1 and isinstance(others[0], Literal) and others[0].text in ("1", "1.0")


def _reads(scan: Scan, numbers: set[str]) -> dict[str, int]:
    """Operators that read the part of the iteration's number, of constants that have as many parts as iterations."""
    body = scan.body
    consts = {i.name: n for n, i in enumerate(body.inputs[: scan.num_consts])}
    reads: dict[str, int] = {}
    for op in body.operators:
        if op.primitive != "dynamic_slice" or op.operands[0] not in consts:
            continue
        const = consts[str(op.operands[0])]
        shape = body.inputs[const].type.shape
        whole = (1, *shape[1:])
        if shape[0] == scan.length and op.results[0].type.shape == whole and _is_number(body, op.operands[1:], numbers):
            reads[op.id] = const
    return reads


def _is_number(body: Graph, starts: Sequence[Operand], numbers: set[str]) -> bool:
    """Whether a slice starts at the number of the iteration: ``i``, or ``where(i < 0, i + n, i)`` of jax.numpy."""
    first = starts[0]
    producer = body.producers.get(first) if isinstance(first, str) else None
    while producer is not None and producer.primitive in ("select_n", "convert_element_type"):
        first = producer.operands[1 if producer.primitive == "select_n" else 0]
        if producer.primitive == "select_n" and not _is_below_zero(body, producer.operands[0], first):
            return False
        producer = body.producers.get(first) if isinstance(first, str) else None
    return first in numbers


def _is_below_zero(body: Graph, which: Operand, number: Operand) -> bool:
    """Whether ``which`` is ``number < 0``."""
    test = body.producers.get(which) if isinstance(which, str) else None
    if test is None or test.primitive != "lt" or test.operands[0] != number:
        return False
    zero = test.operands[1]
    return isinstance(zero, Literal) and zero.is_zero
