"""Checks that a graph is well formed: names, order, types, regions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

from autopar.ir.graph import ROLES, Attr, Graph, Literal, Operand, Operator
from autopar.ir.phases import mark_problems
from autopar.ir.primitives import COMPARISONS, REDUCTIONS, SAME_DTYPE, SAME_SHAPE
from autopar.ir.types import TensorType


class GraphError(ValueError):
    """A graph is not well formed: a fault of what made it, not of the user.

    Args:
        graph: name of the graph.
        problems: everything that was found, each with the operator that it is about.
    """

    def __init__(self, graph: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"graph {graph!r} is not well formed:\n" + "\n".join(f"  - {p}" for p in problems))


def verify(graph: Graph) -> None:
    """Checks a graph and all graphs inside it.

    Names are unique and defined before use; roles are known; updates name an input of the same type, at most one output
    each; outputs have the types of what they return; results have the types that the primitive gives, where
    `autopar.ir.verify` knows it; bodies of scan, while and cond take and return what the operator does; marks are
    known, and of operators that can have them.

    Args:
        graph: any graph.

    Raises:
        GraphError: lists all problems, not the first alone.
    """
    problems = list(_problems(graph, ""))
    if problems:
        raise GraphError(graph.name, problems)


def _problems(graph: Graph, where: str) -> Iterator[str]:
    """Problems of one graph; ``where`` is the path of regions to it, ending in ``/``."""
    repeated = _repeated(op.id for op in graph.operators)
    yield from (f"{where}{id}: {n} operators have this id" for id, n in repeated)
    names = [i.name for i in graph.inputs] + [v.name for op in graph.operators for v in op.results]
    yield from (f"{where}{name}: {n} values have this name" for name, n in _repeated(names))
    yield from (
        f"{where}{path or 'the output'}: {n} outputs have this path {path!r}"
        for path, n in _repeated(o.path for o in graph.outputs)
    )
    for i in graph.inputs:
        if i.role not in ROLES:
            yield f"{where}{i.name}: role {i.role!r} is none of {', '.join(ROLES)}"
    for name, type in [(i.name, i.type) for i in graph.inputs] + [
        (v.name, v.type) for op in graph.operators for v in op.results
    ]:
        if any(n < 0 for n in type.shape):
            yield f"{where}{name}: {type} has a negative dim"

    later = set(names)
    types = {i.name: i.type for i in graph.inputs}
    for op in graph.operators:
        yield from (f"{where}{op.id}: {p}" for p in _operator_problems(op, types, later))
        for name, region in op.regions:
            yield from _problems(region, f"{where}{op.id}/{name}/")
        types.update((v.name, v.type) for v in op.results)
    yield from (where + p for p in _output_problems(graph, types))


def _operator_problems(op: Operator, types: dict[str, TensorType], later: set[str]) -> Iterator[str]:
    """Problems of one operator; ``types`` has what is defined before it, ``later`` is every name of the graph."""
    keys = [key for key, _ in op.attrs]
    if keys != sorted(set(keys)):
        yield f"attributes are not sorted by name, each once: {', '.join(keys)}"
    yield from mark_problems(op)
    yield from (f"{n} regions are called {name!r}" for name, n in _repeated(name for name, _ in op.regions))
    operand_types: list[TensorType] = []
    for operand in op.operands:
        faults = list(_operand_problems(operand, types, later))
        yield from faults
        if isinstance(operand, Literal):
            operand_types.append(operand.type)
        elif not faults:
            operand_types.append(types[operand])
    if len(operand_types) == len(op.operands):
        yield from result_problems(op, tuple(operand_types))
        yield from region_problems(op, tuple(operand_types))


def _operand_problems(operand: Operand, types: dict[str, TensorType], later: set[str]) -> Iterator[str]:
    if isinstance(operand, Literal):
        if operand.type.shape:
            yield f"literal {operand.text} has type {operand.type}; a literal is a scalar"
        if not _is_number(operand.text):
            yield f"literal {operand.text!r} is no number"
    elif operand not in types:
        yield f"uses {operand} before it is made" if operand in later else f"uses {operand}, which nothing makes"


def _output_problems(graph: Graph, types: dict[str, TensorType]) -> Iterator[str]:
    inputs = {i.name: i for i in graph.inputs}
    for o in graph.outputs:
        label = f"output {o.path!r}"
        faults = list(_operand_problems(o.operand, types, set()))
        yield from (f"{label}: {p}" for p in faults)
        if not faults:
            type = graph.type_of(o.operand)
            if type != o.type:
                yield f"{label}: has type {o.type}, but what it returns has {type}"
        if o.updates is None:
            continue
        if o.updates not in inputs:
            yield f"{label}: updates {o.updates}, which is no input"
        elif inputs[o.updates].type != o.type:
            yield f"{label}: has type {o.type}, but the input {o.updates} that it updates has {inputs[o.updates].type}"
    updated = _repeated(o.updates for o in graph.outputs if o.updates is not None)
    yield from (f"{n} outputs update the input {name}" for name, n in updated)


def _is_number(text: str) -> bool:
    if text in ("True", "False"):
        return True
    try:
        complex(text)
    except ValueError:
        return False
    return True


def _repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that come more than once, with how often."""
    return [(name, n) for name, n in Counter(names).items() if n > 1]


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


def result_problems(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    """Contradictions between the results of an operator and its operands; none for a primitive without a rule.

    Args:
        op: the operator.
        operands: types of what it takes.
    """
    rule = _rule(op.primitive)
    if rule is None:
        return
    if len(op.results) != 1:
        yield f"has {len(op.results)} results; {op.primitive} has 1"
        return
    try:
        yield from rule(op, operands, op.results[0].type)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        yield f"its attributes do not fit {', '.join(map(str, operands)) or 'no operands'}: {error}"


_Rule = Callable[[Operator, tuple[TensorType, ...], TensorType], Iterator[str]]


def _rule(primitive: str) -> _Rule | None:
    if primitive in SAME_DTYPE or primitive in COMPARISONS or primitive in SAME_SHAPE:
        return _elementwise
    return _reduce if primitive in REDUCTIONS else _RULES.get(primitive)


def _expect(actual: TensorType, shape: tuple[int, ...], dtype: str | None) -> Iterator[str]:
    wanted = TensorType(shape, dtype or actual.dtype)
    if actual != wanted:
        yield f"its result has type {actual}, not {wanted}"


def _elementwise(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    shapes = sorted({t.shape for t in operands if t.shape})
    whole = _together(shapes)
    if whole is None or not operands:
        yield f"takes shapes that differ: {', '.join(map(str, operands))}"
        return
    dtype = None
    if op.primitive in SAME_DTYPE or op.primitive in COMPARISONS:
        dtypes = sorted({t.dtype for t in operands})
        if len(dtypes) > 1:
            yield f"takes dtypes that differ: {', '.join(map(str, operands))}"
        dtype = "bool" if op.primitive in COMPARISONS else operands[0].dtype
        given = dict(op.attrs).get("out_dtype")
        dtype = given if isinstance(given, str) else dtype
    elif op.primitive == "convert_element_type":
        dtype = str(op.attr("new_dtype"))
    elif op.primitive == "is_finite":
        dtype = "bool"
    elif op.primitive == "select_n":
        dtype = operands[1].dtype
        if any(t.dtype != dtype for t in operands[1:]):
            yield f"chooses among dtypes that differ: {', '.join(map(str, operands[1:]))}"
    yield from _expect(result, whole, dtype)


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of an elementwise result: of equal rank, dims equal or 1; None where they do not go together."""
    if len({len(s) for s in shapes}) > 1:
        return None
    shape = []
    for sizes in zip(*shapes, strict=True):
        longer = {n for n in sizes if n != 1}
        if len(longer) > 1:
            return None
        shape.append(longer.pop() if longer else 1)
    return tuple(shape)


def _reduce(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    axes = _dims(op.ints("axes"), operand.rank)
    shape = tuple(n for d, n in enumerate(operand.shape) if d not in axes)
    given = dict(op.attrs).get("out_dtype")
    yield from _expect(result, shape, given if isinstance(given, str) else operand.dtype)


def _transpose(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    order = _dims(op.ints("permutation"), operand.rank)
    if len(order) != operand.rank:
        yield f"permutation {order} is not one of {operand.rank} dims"
        return
    yield from _expect(result, tuple(operand.shape[d] for d in order), operand.dtype)


def _reshape(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    operand = operands[0]
    if math.prod(op.ints("new_sizes")) != operand.size:
        yield f"{operand} does not have as many elements as {op.ints('new_sizes')}"
    yield from _expect(result, op.ints("new_sizes"), operand.dtype)


def _broadcast(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    operand, shape = operands[0], op.ints("shape")
    dims = _dims(op.ints("broadcast_dimensions"), len(shape))
    if len(dims) != operand.rank or any(n not in (1, shape[d]) for n, d in zip(operand.shape, dims, strict=False)):
        yield f"{operand} does not lie along dims {dims} of {shape}"
    yield from _expect(result, shape, operand.dtype)


def _squeeze(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    gone = _dims(op.ints("dimensions"), operand.rank)
    if any(operand.shape[d] != 1 for d in gone):
        yield f"squeezes dims {gone} of {operand}, of which some are not 1"
    yield from _expect(result, tuple(n for d, n in enumerate(operand.shape) if d not in gone), operand.dtype)


def _concatenate(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    first = operands[0]
    (dim,) = _dims((op.integer("dimension"),), first.rank)
    rests = sorted({(t.shape[:dim], t.shape[dim + 1 :], t.dtype) for t in operands})
    if len(rests) > 1:
        yield f"joins along dim {dim} what differs elsewhere: {', '.join(map(str, operands))}"
        return
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in operands), *first.shape[dim + 1 :])
    yield from _expect(result, shape, first.dtype)


def _dot_general(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    left, right = operands
    summed, batch = (_pair(p) for p in _pair(op.attr("dimension_numbers")))
    left_summed, right_summed, left_batch, right_batch = map(_ints, (*summed, *batch))
    left_gone = _dims((*left_batch, *left_summed), left.rank)
    right_gone = _dims((*right_batch, *right_summed), right.rank)
    sizes = [left.shape[d] for d in left_gone]
    if sizes != [right.shape[d] for d in right_gone] or len(left_batch) != len(right_batch):
        yield f"dims {left_gone} of {left} and {right_gone} of {right} do not have the same sizes"
        return
    shape = (
        *sizes[: len(left_batch)],
        *(n for d, n in enumerate(left.shape) if d not in left_gone),
        *(n for d, n in enumerate(right.shape) if d not in right_gone),
    )
    given = dict(op.attrs).get("preferred_element_type")
    yield from _expect(result, shape, given if isinstance(given, str) else None)


def _pair(value: Attr) -> tuple[Attr, Attr]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{value!r} is not a pair")
    return value


def _ints(value: Attr) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is not a tuple of ints")
    ints = tuple(v for v in value if isinstance(v, int))
    if len(ints) != len(value):
        raise TypeError(f"{value!r} is not a tuple of ints")
    return ints


def _dims(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``dims``, or ValueError unless all are different dims of a tensor of ``rank``."""
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise ValueError(f"{dims} are not different dims below {rank}")
    return dims


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "broadcast_in_dim": _broadcast,
        "concatenate": _concatenate,
        "dot_general": _dot_general,
        "reshape": _reshape,
        "squeeze": _squeeze,
        "transpose": _transpose,
    }
)
