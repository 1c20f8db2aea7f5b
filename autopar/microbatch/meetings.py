"""`analyze_in_loops`: a step whose examples meet, in several loops over its microbatches.

A contrastive loss, a balance loss over the global batch or a batch norm with global statistics needs values of all
microbatches before the rest of the step can go on: there the examples meet. The first loop computes what meets; the
work on it runs once, on whole values; the next loop computes again what it needs of a microbatch, and goes on with
what is known. So values are those of the whole batch, activations are those of one microbatch, and the forward pass
before each meeting runs once more (GradCache: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", RepL4NLP 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from autopar.errors import MicrobatchError
from autopar.ir import Graph, Input, Layout, Operator, Output
from autopar.ir.analysis import closure, dependents, names_made, names_read
from autopar.ir.phases import phase_of
from autopar.ir.primitives import CONTRACTIONS
from autopar.microbatch.analyze import (
    States,
    analyze,
    collect,
    examples,
    forward_states,
    in_loop_states,
    is_mixed,
)
from autopar.microbatch.base import Microbatching, pseudo_mesh
from autopar.microbatch.inside import MicrobatchAxis
from autopar.microbatch.match import whole

# Loops over the microbatches up to which a step is cut: each runs the forward pass once more, a step of this many
# loops takes about twice as long as one of one loop.
_MOST_LOOPS = 4


@dataclass(frozen=True)
class MicrobatchLoop:
    """One loop over the microbatches, and what runs once before and after it.

    Args:
        graph: the step, in which results of earlier loops are inputs.
        microbatching: of it; ``after`` has what runs before the next loop.
    """

    graph: Graph
    microbatching: Microbatching


@dataclass(frozen=True)
class Meeting:
    """Operators on all examples, between two loops over microbatches.

    Args:
        joined: values of microbatches that it takes, terms and examples.
        operators: it, in running order.
    """

    joined: tuple[str, ...]
    operators: tuple[Operator, ...]


def analyze_in_loops(graph: Graph, count: int) -> tuple[MicrobatchLoop, ...]:
    """Analyzes ``graph`` in ``count`` microbatches: in one loop, or in several where examples meet.

    Prints, and callbacks whose results nothing needs, run once after the last loop, with whole values.

    Args:
        graph: a traced train step with roles.
        count: number of equal microbatches.

    Raises:
        MicrobatchError: there is no batch, ``count`` does not divide it, or examples meet too often, inside a loop, or
            after a print or callback.
    """
    called = [op for op in graph.operators if op.effects]
    returned = [o.operand for o in graph.outputs]
    needed = {op.id for op in closure(graph.operators, [*returned, *names_read(called)])}
    alone = {op.id: op for op in called if op.id not in needed}
    if not alone:
        return _in_loops(graph, count)
    read = [n for n in sorted(names_read(alone.values())) if n not in returned]
    outputs = tuple(Output(n, n, graph.types[n]) for n in read)
    *loops, last = _in_loops(replace(graph, outputs=(*graph.outputs, *outputs)), count)
    ids = {*last.microbatching.after, *alone}
    after = tuple(op.id for op in graph.operators if op.id in ids)
    return (*loops, replace(last, microbatching=replace(last.microbatching, after=after)))


def _in_loops(graph: Graph, count: int) -> tuple[MicrobatchLoop, ...]:
    try:
        return (MicrobatchLoop(graph, analyze(graph, count)),)
    except MicrobatchError:
        batch = examples(graph, count, 0)
        loops = None if batch is None else _loops(graph, count, batch)
        if loops is None:
            raise
        return loops


def operators_between(graph: Graph, count: int) -> frozenset[str]:
    """Ids of the operators that run between two loops, and of those that make what they take of microbatches.

    Args:
        graph: a traced train step with roles.
        count: number of equal microbatches.

    Raises:
        MicrobatchError: the step cannot be cut into so many.
    """
    ids: set[str] = set()
    for loop in analyze_in_loops(graph, count)[:-1]:
        joined = {j.name for j in loop.microbatching.joined}
        ids.update(loop.microbatching.after)
        ids.update(op.id for op in graph.operators if any(v.name in joined for v in op.results))
    return frozenset(ids)


def _loops(graph: Graph, count: int, batch: dict[str, int]) -> tuple[MicrobatchLoop, ...] | None:
    """Loops over microbatches, cut where examples meet; None if they are too many, or a meeting fits between none."""
    axis = MicrobatchAxis(pseudo_mesh(count))
    loops: list[MicrobatchLoop] = []
    model = matrices_of_model(graph)
    while len(loops) < _MOST_LOOPS:
        states = forward_states(graph, batch, axis, frozenset())
        if not is_mixed(graph, states):
            return (*loops, MicrobatchLoop(graph, collect(graph, count, batch, states, axis)))
        meeting = meeting_of(graph, states, axis, model)
        if not meeting.joined:
            return None
        loop = loop_until(graph, count, batch, axis, meeting, model)
        if loop is None:
            return None
        loops.append(loop)
        graph = step_after(graph, meeting, states)
    return None


def meeting_of(graph: Graph, s: States, axis: MicrobatchAxis, model: frozenset[str], *, wide: bool = False) -> Meeting:
    """Operators on all examples that can run after one loop over microbatches.

    What takes cotangents back through the model's matrices does not: in the next loop it runs on one microbatch.

    Args:
        graph: the step.
        s: states of its values.
        axis: of microbatches.
        model: the matrices of parameters.
        wide: whether all that waits of the forward pass runs there, with the examples that it takes, so that they meet
            once and not again.
    """
    mixing = [op for op in s.mixing if phase_of(op) != "update"]
    needed = {op.id for op in (*closure(graph.operators, names_read(mixing)), *mixing)}
    joined: dict[str, None] = {}
    operators: list[Operator] = []
    ready: set[str] = set()
    for op in graph.operators:
        if op.id not in needed or not any(v.name in s.late for v in op.results):
            continue
        if phase_of(op) == "backward" and _is_heavy(op) and not model.isdisjoint(op.reads):
            continue
        late = {n for n in op.reads if n in s.late}
        terms = [n for n in op.reads if n not in late and s.values[n].partial]
        joined.update((_least_term(graph, s, n), None) for n in terms)
        if not late <= ready:
            continue
        of_examples = [n for n in op.reads if n not in late and s.values[n].axes]
        if wide:
            runs = phase_of(op) != "backward" or all(n in joined for n in of_examples)
        else:
            is_example = bool(of_examples) and bool(terms or late)
            runs = not is_example or (not terms and _has_terms(graph, op, s, ready, axis, joined))
        if runs:
            operators.append(op)
            ready.update(v.name for v in op.results)
            joined.update(dict.fromkeys(of_examples))
    return Meeting(tuple(joined), tuple(operators))


def _least_term(graph: Graph, s: States, name: str) -> str:
    """The smallest of the terms that a term is computed from, one after another, without examples.

    A mean that is broadcast to all examples is a term of a mean.
    """
    while name in graph.producers:
        op = graph.producers[name]
        terms = [n for n in op.reads if s.values[n].partial]
        if len(terms) != 1 or len(op.results) > 1 or any(s.values[n].axes for n in op.reads):
            break
        if graph.types[terms[0]].nbytes > graph.types[name].nbytes:
            break
        (name,) = terms
    return name


def _has_terms(
    graph: Graph, op: Operator, s: States, ready: set[str], axis: MicrobatchAxis, joined: dict[str, None]
) -> bool:
    """Whether an operator on examples and on what is ready would yield terms in the next loop, though it could run now.

    It runs now where the examples that it takes are joined in any case.
    """
    if any(n not in joined for n in op.reads if n not in ready and s.values[n].axes):
        return False
    states: list[Layout | None] = []
    for operand, type in zip(op.operands, graph.operand_types(op), strict=True):
        known = isinstance(operand, str) and operand not in ready
        states.append(s.values[str(operand)] if known else whole(type) if isinstance(operand, str) else None)
    results = in_loop_states(graph, op, states, s, axis)
    return results is None or any(k.partial for k in results)


def loop_until(
    graph: Graph, count: int, batch: dict[str, int], axis: MicrobatchAxis, meeting: Meeting, model: frozenset[str]
) -> MicrobatchLoop | None:
    """The loop before a meeting, with the meeting; None where it cannot run apart from the rest.

    Args:
        graph: the step.
        count: number of microbatches.
        batch: inputs that are split, with the dim.
        axis: of microbatches.
        meeting: what runs after the loop.
        model: the matrices of parameters.
    """
    operators = closure(graph.operators, meeting.joined)
    heavy = [op for op in meeting.operators if _is_heavy(op)]
    if not model.isdisjoint(names_read(heavy)):
        return None  # layers that would run on the whole batch
    if any(op.effects for op in (*operators, *meeting.operators)):
        return None  # that would happen twice
    outputs = tuple(Output(n, n, graph.types[n]) for n in meeting.joined)
    part = Graph(graph.name, graph.inputs, tuple(operators), outputs)
    states = forward_states(part, batch, axis, frozenset())
    microbatching = collect(part, count, batch, states, axis)
    before = [op for op in graph.operators if op.id in set(microbatching.before)]
    given = {*names_made(before), *meeting.joined}
    after = closure(graph.operators, names_read(meeting.operators), given=given)
    ids = {op.id for op in (*after, *meeting.operators)}
    return MicrobatchLoop(graph, replace(microbatching, after=tuple(op.id for op in graph.operators if op.id in ids)))


def _is_heavy(op: Operator) -> bool:
    return bool(op.regions) or op.primitive in CONTRACTIONS


def matrices_of_model(graph: Graph) -> frozenset[str]:
    """Matrices that depend on parameters, and on no example."""
    of_batch = dependents(graph.operators, (i.name for i in graph.inputs if i.role == "batch"))
    of_parameters = [i.name for i in graph.inputs if i.role == "parameter"]
    names = {*of_parameters, *names_made(dependents(graph.operators, of_parameters))} - set(names_made(of_batch))
    return frozenset(n for n in names if graph.types[n].rank > 1)


def step_after(graph: Graph, meeting: Meeting, s: States) -> Graph:
    """The step after a meeting: what it made and the sums of terms are inputs.

    Examples that it took are made again in the next loop.

    Args:
        graph: the step.
        meeting: what ran.
        s: states of the step's values.
    """
    known = dict.fromkeys(names_made(meeting.operators))
    known.update(dict.fromkeys(n for n in meeting.joined if s.values[n].partial))
    inputs = tuple(Input(n, graph.types[n], "parameter") for n in known)
    kept = (_without(op, known.keys()) for op in graph.operators)
    return Graph(graph.name, (*graph.inputs, *inputs), tuple(op for op in kept if op is not None), graph.outputs)


def _without(op: Operator, known: Container[str]) -> Operator | None:
    """An operator whose results of these names nobody reads; None where it has no others."""
    if not op.results or not any(v.name in known for v in op.results):
        return op
    if all(v.name in known for v in op.results):
        return None
    results = tuple(replace(v, name=f"{v.name}.term") if v.name in known else v for v in op.results)
    return replace(op, results=results)
