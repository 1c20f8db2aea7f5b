"""Signatures of the bodies of scan, while and cond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from autopar.ir.graph import Graph, Operator
from autopar.ir.types import TensorType


def region_problems(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    """Faults of the regions of a scan, while or cond; none for any other operator.

    Args:
        op: the operator.
        operands: types of what it takes.
    """
    if op.primitive == "scan":
        yield from _scan(op, operands)
    elif op.primitive == "while":
        yield from _while(op, operands)
    elif op.primitive == "cond":
        yield from _cond(op, operands)


def _count(op: Operator, name: str) -> int | None:
    """An attribute that counts; None where it is missing or no count."""
    value = dict(op.attrs).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _named(op: Operator, wanted: tuple[str, ...]) -> Iterator[str]:
    names = tuple(name for name, _ in op.regions)
    if names != wanted:
        yield f"has regions {names}; a {op.primitive} has {wanted}"


def _same(what: str, types: Sequence[TensorType], wanted: Sequence[TensorType]) -> Iterator[str]:
    """A problem for each place where two lists of types differ."""
    if len(types) != len(wanted):
        yield f"{what}: {len(types)}, not {len(wanted)}"
        return
    for i, (a, b) in enumerate(zip_longest(types, wanted)):
        if a != b:
            yield f"{what} {i} has type {a}, not {b}"


def _takes(region: Graph) -> list[TensorType]:
    return [i.type for i in region.inputs]


def _returns(region: Graph) -> list[TensorType]:
    return [o.type for o in region.outputs]


def _made(op: Operator) -> list[TensorType]:
    return [v.type for v in op.results]


def _row(type: TensorType) -> TensorType:
    return TensorType(type.shape[1:], type.dtype)


def _scan(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    faults = list(_named(op, ("body",)))
    consts, carry, length = (_count(op, n) for n in ("num_consts", "num_carry", "length"))
    if consts is None or carry is None or length is None:
        faults.append("num_consts, num_carry and length are not all counts")
    yield from faults
    if faults or consts is None or carry is None:
        return
    held = consts + carry
    if len(operands) < held:
        yield f"takes {len(operands)} operands, fewer than num_consts + num_carry = {held}"
        return
    body = op.region("body")
    state, rows = list(operands[consts:held]), operands[held:]
    results = _made(op)
    for i, type in enumerate([*rows, *results[carry:]]):
        if type.shape[:1] != (length,):
            which = f"operand {held + i}" if i < len(rows) else f"result {carry + i - len(rows)}"
            yield f"{which} has type {type}; its first dim is not the length {length}"
    yield from _same("input of the body", _takes(body), [*operands[:held], *map(_row, rows)])
    yield from _same("output of the body", _returns(body), [*state, *map(_row, results[carry:])])
    yield from _same("carried result", results[:carry], state)


def _while(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    faults = list(_named(op, ("cond", "body")))
    cond, body = _count(op, "cond_nconsts"), _count(op, "body_nconsts")
    if cond is None or body is None:
        faults.append("cond_nconsts and body_nconsts are not both counts")
    yield from faults
    if faults or cond is None or body is None:
        return
    if len(operands) < cond + body:
        yield f"takes {len(operands)} operands, fewer than cond_nconsts + body_nconsts = {cond + body}"
        return
    state = operands[cond + body :]
    yield from _same("input of the condition", _takes(op.region("cond")), [*operands[:cond], *state])
    decided = _returns(op.region("cond"))
    if len(decided) != 1 or decided[0].dtype != "bool":  # under vmap it has dims: one decision a row
        yield f"the condition returns {', '.join(map(str, decided)) or 'nothing'}, not one bool"
    yield from _same("input of the body", _takes(op.region("body")), [*operands[cond : cond + body], *state])
    yield from _same("output of the body", _returns(op.region("body")), state)
    yield from _same("result", _made(op), state)


def _cond(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    if not op.regions or not operands:
        yield "has no branches, or no operand that chooses one"
        return
    yield from _named(op, tuple(str(i) for i in range(len(op.regions))))
    if operands[0].shape or operands[0].dtype not in ("i32", "bool"):
        yield f"chooses a branch by {operands[0]}, not by i32[] or bool[]"
    for name, branch in op.regions:
        yield from _same(f"input of branch {name}", _takes(branch), operands[1:])
        yield from _same(f"output of branch {name}", _returns(branch), _made(op))
