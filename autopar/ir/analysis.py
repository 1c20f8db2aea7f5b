"""Dependence in a graph: closures, reachability, liveness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from autopar.ir.graph import Graph, Operand, Operator
from autopar.ir.phases import BACKWARD, phase_of
from autopar.ir.primitives import CALLBACKS


def names_read(operators: Iterable[Operator]) -> set[str]:
    """Names of all values that ``operators`` take."""
    return {o for op in operators for o in op.reads}


def names_made(operators: Iterable[Operator]) -> list[str]:
    """Names of all values that ``operators`` make, in their order."""
    return [v.name for op in operators for v in op.results]


def closure(
    operators: Sequence[Operator],
    wanted: Iterable[Operand],
    *,
    given: Iterable[str] = (),
    within: Callable[[Operator], bool] | None = None,
) -> list[Operator]:
    """Operators that have to run for ``wanted``, in running order.

    Args:
        operators: those of a graph, in running order.
        wanted: values that are to be made; literals and inputs need nothing.
        given: values that are there already.
        within: whether an operator may be among them; what others make is taken as given. None allows all.
    """
    there = frozenset(given)
    needed = {o for o in wanted if isinstance(o, str)} - there
    kept = []
    for op in reversed(operators):
        if any(v.name in needed for v in op.results) and (within is None or within(op)):
            kept.append(op)
            needed.update(o for o in op.reads if o not in there)
    return kept[::-1]


def taken_by(operators: Sequence[Operator], wanted: Iterable[Operand]) -> tuple[list[Operator], list[str]]:
    """Operators that make values, in running order, and the names that they take from elsewhere.

    Args:
        operators: those that may be taken, in running order.
        wanted: the values; literals are made by nothing.
    """
    makers = closure(operators, wanted)
    made_here = set(names_made(makers))
    return makers, list(dict.fromkeys(n for op in makers for n in op.reads if n not in made_here))


def live(operators: Sequence[Operator], returned: Iterable[Operand]) -> list[Operator]:
    """Operators that something returned or a side effect depends on, in running order.

    Args:
        operators: those of a graph, in running order.
        returned: what the graph returns.
    """
    needed = {o for o in returned if isinstance(o, str)}
    kept = []
    for op in reversed(operators):
        if op.effects or any(v.name in needed for v in op.results):
            kept.append(op)
            needed.update(op.reads)
    return kept[::-1]


def dependents(
    operators: Iterable[Operator], sources: Iterable[str], *, also: Callable[[Operator], bool] | None = None
) -> list[Operator]:
    """Operators that depend on some of ``sources``, in running order.

    Args:
        operators: those of a graph, in running order.
        sources: names of values.
        also: whether an operator counts though it takes nothing of them; what it makes is a source then.
    """
    reached = set(sources)
    kept = []
    for op in operators:
        if not reached.isdisjoint(op.reads) or (also is not None and also(op)):
            kept.append(op)
            reached.update(v.name for v in op.results)
    return kept


def reached_outputs(graph: Graph) -> Mapping[str, int]:
    """Outputs that depend on each value: bit i stands for output i; 0 for none.

    Sets would take as long as inputs times outputs.
    """
    reached: dict[str, int] = defaultdict(int)
    for i, output in enumerate(graph.outputs):
        if isinstance(output.operand, str):
            reached[output.operand] |= 1 << i
    for op in reversed(graph.operators):
        outputs = 0
        for v in op.results:
            outputs |= reached[v.name]
        if outputs:
            for name in op.reads:
                reached[name] |= outputs
    return reached


def places(
    operators: Sequence[Operator],
    read_at: dict[str, set[int]],
    decide: Callable[[Operator, set[int]], Iterable[int]],
) -> dict[str, tuple[int, ...]]:
    """Where operators run, by id: decided for each from the places where its results are read, readers first.

    Args:
        operators: those of a graph, in running order.
        read_at: by value where it is read; what ``operators`` read is added.
        decide: from an operator and where its results are read to where it runs.
    """
    by_id = {}
    for op in reversed(operators):
        wanted = set().union(*(read_at.get(v.name, set()) for v in op.results))
        by_id[op.id] = tuple(sorted(decide(op, wanted)))
        for name in op.reads:
            read_at.setdefault(name, set()).update(by_id[op.id])
    return by_id


def unread_inputs(graph: Graph) -> frozenset[int]:
    """Indices of the inputs of ``graph`` that no operator takes and that are not returned."""
    read = names_read(graph.operators) | {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    return frozenset(n for n, i in enumerate(graph.inputs) if i.name not in read)


def meeting_operator(graph: Graph, op: Operator, late: Container[str], is_term: Callable[[str], bool]) -> Operator:
    """The operator in which values meet: the first one that needs all, or the reduction before it.

    Args:
        graph: that the operator is in.
        op: an operator that needs all of them.
        late: names of values that are there when all have come.
        is_term: whether a value is a term of what they are added up to.
    """
    for leads in (late.__contains__, is_term):
        while before := [graph.producers[n] for n in op.reads if leads(n) and n in graph.producers]:
            op = before[0]
    return op


def unread_effects(graph: Graph) -> tuple[Operator, ...]:
    """Operators run for their effect alone, in bodies too: prints, and callbacks of which nothing is returned."""
    returned = [o.operand for o in graph.outputs]
    needed = {op.id for op in closure(graph.operators, returned)}
    unread: list[Operator] = []
    for op in graph.operators:
        inside = [inner for _, body in op.regions for inner in unread_effects(body)]
        unread += inside or ([op] if op.effects and op.id not in needed else [])
    return tuple(unread)


def place(first: Operator, makers: Mapping[str, Operator], placed: dict[str, Operator]) -> None:
    """Adds an operator to those that have a place, after whatever it reads that has none yet.

    Args:
        first: the operator.
        makers: by value the operator that makes it.
        placed: by id, in running order.
    """
    stack = [first]
    while stack:
        op = stack[-1]
        missing = [makers[o] for o in op.reads if o in makers and makers[o].id not in placed]
        if missing:
            stack.extend(missing)
        else:
            stack.pop()
            placed.setdefault(op.id, op)


def state_bytes(graph: Graph) -> int:
    """Bytes of parameters and of the state of the optimizer, as a step is given them."""
    return sum(i.type.nbytes for i in graph.inputs if i.role in ("parameter", "optimizer"))


def gradient_bytes(graph: Graph) -> int:
    """Bytes of gradients: what the backward pass hands to the rest, at most those of the parameters that are updated.

    A step that takes gradients of copies in fewer bits hands over those bits alone.
    """
    backward = [op for op in graph.operators if phase_of(op) == BACKWARD]
    rest = names_read(op for op in graph.operators if phase_of(op) != BACKWARD)
    handed = sum(v.type.nbytes for op in backward for v in op.results if v.name in rest)
    updated = {output.updates for output in graph.outputs}
    return min(handed, sum(i.type.nbytes for i in graph.inputs if i.role == "parameter" and i.name in updated))


def operators_with_bodies(graph: Graph) -> Iterator[Operator]:
    """All operators of a graph, each before those of its bodies."""
    for op in graph.operators:
        yield op
        for _, body in op.regions:
            yield from operators_with_bodies(body)


def calls_python(graph: Graph) -> bool:
    """Whether a graph has prints or callbacks, in bodies too."""
    return any(op.primitive in CALLBACKS for op in operators_with_bodies(graph))
