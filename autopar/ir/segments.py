"""Loops over segments of layers: which stacks they take in slices alone, and which they write row by row.

Such a loop has a loop over the layers of a segment in its body. Stacks of all layers go through both whole, as
constants or carries, and the inner body reads the row of its layer: slices of slices would be copies.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import SEGMENTS


def of_segments(op: Operator) -> bool:
    """Whether an operator is what runs layers in segments: a loop, or what reads and writes rows of stacks in one."""
    return SEGMENTS in op.marks


def is_segmented(op: Operator) -> bool:
    """Whether an operator is a loop over segments of layers, or over the layers of one."""
    return op.primitive == "scan" and of_segments(op)


def sliced_inside(op: Operator) -> frozenset[int]:
    """Numbers of the constants and carries of a loop of segments that its body takes in rows alone.

    Args:
        op: an operator; of others than loops of segments there are none.
    """
    if not is_segmented(op):
        return frozenset()
    loop = Scan.of(op)
    entries = {entry.name: n for n, entry in enumerate(loop.body.inputs[: loop.num_whole]) if entry.type.rank}
    whole = {o.operand for o in loop.body.outputs if isinstance(o.operand, str)}
    rows, written = set[int](), _rows_written(loop)
    for name, n in entries.items():
        readers = [reader for reader in loop.body.operators if name in reader.reads]
        carried = n >= loop.num_consts
        if carried and n - loop.num_consts not in written:
            continue
        if readers and (carried or name not in whole) and all(_takes_rows(reader, name) for reader in readers):
            rows.add(n)
    return frozenset(rows)


def _takes_rows(reader: Operator, name: str) -> bool:
    """Whether an operator reads, or writes, rows of a stack alone."""
    numbers = {n for n, operand in enumerate(reader.operands) if operand == name}
    if reader.primitive == "gather":
        return numbers == {0} and reader.ints("collapsed_slice_dims") == (0,) and _is_row(reader)
    if reader.primitive == "dynamic_update_slice":
        return numbers == {0}
    return numbers <= sliced_inside(reader)


def _is_row(reader: Operator) -> bool:
    """Whether a read at computed positions takes one row of the first dim, whole."""
    sizes, (result,) = reader.ints("slice_sizes"), reader.results
    return sizes[0] == 1 and sizes[1:] == result.type.shape


def _rows_written(loop: Scan) -> frozenset[int]:
    """Numbers of the carries of which the body replaces rows alone, the last that it does with them."""
    return frozenset(j for j in range(loop.num_carry) if _is_written(loop.body, loop, j))


def _is_written(body: Graph, loop: Scan, carry: int) -> bool:
    entry, end = body.inputs[loop.num_consts + carry].name, body.outputs[carry].operand
    order = {op.id: n for n, op in enumerate(body.operators)}
    while end != entry:
        maker = body.producers.get(end) if isinstance(end, str) else None
        if maker is None:
            return False
        if maker.primitive == "dynamic_update_slice":
            before = maker.operands[0]
        elif is_segmented(maker):
            inner, result = Scan.of(maker), [v.name for v in maker.results].index(str(end))
            if result not in _rows_written(inner):
                return False
            before = maker.operands[inner.num_consts + result]
        else:
            return False
        last = max((order[op.id] for op in body.operators if before in op.reads), default=-1)
        if last > order[maker.id] or any(o.operand == before for o in body.outputs):
            return False
        end = before
    return True
