"""Stacks that a loop takes in slices and replaces slice by slice: they may be written where they lie.

A loop over segments of layers carries such a stack, and writes it row by row.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.segments import sliced_inside


def replaced_in_place(graph: Graph, op: Operator) -> Mapping[int, int]:
    """Stacks of state that a backward loop replaces and reads last: by number of the operand that of the result.

    Each is an input of the step that the loop takes once, in slices, or carries and takes in rows, and that nothing
    reads after it. The loop makes the stack that replaces it, which nothing else in the step reads.

    Args:
        graph: the step.
        op: an operator of it.
    """
    if op.primitive != "scan" or phase_of(op) != "backward":
        return {}
    loop = Scan.of(op)
    carried = {n - loop.num_consts for n in sliced_inside(op) if n >= loop.num_consts}
    stacks = {v.name: n for n, v in enumerate(op.results) if n >= loop.num_carry or n in carried}
    replaced = {o.updates: stacks[o.operand] for o in graph.outputs if o.operand in stacks and o.updates is not None}
    if not replaced:
        return {}
    returned = [o.operand for o in graph.outputs]
    behind = {o for other in graph.operators[graph.operators.index(op) + 1 :] for o in other.reads}
    return {
        n: replaced[operand]
        for n, operand in enumerate(op.operands)
        if isinstance(operand, str)
        and operand in replaced
        and (n >= loop.num_whole if replaced[operand] >= loop.num_carry else n == loop.num_consts + replaced[operand])
        and op.operands.count(operand) == 1
        and operand not in behind
        and operand not in returned
        and op.results[replaced[operand]].name not in behind
        and returned.count(op.results[replaced[operand]].name) == 1
        and op.results[replaced[operand]].type == graph.types[operand]
    }
