"""`analyze_with_barrier`: a step whose examples meet once, as the stages of a pipeline run it.

All forward passes run first. What needs values of all microbatches runs once after them, on whole values; the backward
passes take its results. Nothing of a forward pass runs again, as in the loops of `autopar.microbatch.meetings`: what it
left is held for all microbatches, as GPipe holds it (Huang et al., GPipe, 2019, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.ir import Graph, Layout
from autopar.ir.analysis import closure, dependents, names_made, names_read
from autopar.ir.phases import phase_of
from autopar.ir.primitives import CONTRACTIONS
from autopar.microbatch.analyze import States, analyze, entering, examples, forward_states, is_mixed, operand_layouts
from autopar.microbatch.base import Joined, Microbatching, pseudo_mesh
from autopar.microbatch.inside import Decisions, MicrobatchAxis
from autopar.microbatch.match import whole
from autopar.microbatch.meetings import analyze_in_loops, loop_until, matrices_of_model, meeting_of, step_after


def analyze_with_barrier(graph: Graph, count: int, late: frozenset[str] = frozenset()) -> Microbatching:
    """Analyzes ``graph`` in ``count`` microbatches for a pipeline, where examples may meet between its two passes.

    Args:
        graph: a traced train step with roles.
        count: number of equal microbatches.
        late: ids of operators that are to run after the loop though they could run in it.

    Raises:
        MicrobatchError: there is no batch, ``count`` does not divide it, examples meet more than once, or the model
            goes on after they have met.
    """
    try:
        return analyze(graph, count, late)
    except MicrobatchError as error:
        batch = examples(graph, count, 0)
        if batch is None:
            raise
        for wide in (False, True):
            microbatching = _with_barrier(graph, count, batch, late, wide)
            if microbatching is not None:
                return microbatching
        raise _in_one_stage(graph, count, error) from None


def _in_one_stage(graph: Graph, count: int, error: MicrobatchError) -> MicrobatchError:
    """``error``, which says how many loops one stage runs where it can."""
    try:
        loops = len(analyze_in_loops(graph, count))
    except MicrobatchError:
        return error
    return MicrobatchError(
        f"{error.fact}; stages have one moment for that, between the forward and the backward passes of all "
        "microbatches",
        cause="examples meet more than once, or layers of the model are after where they meet (batch norm)",
        remedy=f"num_stages=1, which runs {loops} loops over the microbatches, num_microbatches=1, or a statistic over "
        "a part of the batch (group norm, groups of tokens)",
        source=error.source,
    )


@dataclass(frozen=True)
class _Halves:
    """A step before and after where its examples meet.

    Args:
        first: ids of the operators of a microbatch that what meets needs.
        joined: values of microbatches that meet.
        known: values that the meeting makes.
        states: of all values: of those of ``first`` while they run, of all others after the meeting.
    """

    first: frozenset[str]
    joined: tuple[Joined, ...]
    known: frozenset[str]
    states: States

    @property
    def totals(self) -> frozenset[str]:
        """Terms that meet: in the loop of each microbatch its own, after the meeting their sum."""
        return frozenset(j.name for j in self.joined if j.layout.partial)


def _halves(
    graph: Graph, count: int, batch: dict[str, int], late: frozenset[str], axis: MicrobatchAxis, wide: bool
) -> _Halves | None:
    """The step cut where its examples meet; None where they meet again, or where the forward pass goes on.

    With ``wide`` as much as can be runs where they meet.
    """
    before = forward_states(graph, batch, axis, late)
    model = matrices_of_model(graph)
    meeting = meeting_of(graph, before, axis, model, wide=wide)
    loop = loop_until(graph, count, batch, axis, meeting, model) if meeting.joined else None
    if loop is None:
        return None
    rest = step_after(graph, meeting, before)
    after = forward_states(rest, batch, axis, late)
    if is_mixed(rest, after):
        return None
    first = [op for op in graph.operators if op.id in set(loop.microbatching.body)]
    if any(phase_of(op) == "backward" for op in first):
        return None
    of_first = {n: before.values[n] for n in names_made(first)}
    states = States(
        {**after.values, **of_first},
        after.late,
        before.after_barrier | after.after_barrier,
        {**after.matches, **{op.id: before.matches[op.id] for op in first if op.id in before.matches}},
    )
    known = frozenset(names_made(meeting.operators))
    return _Halves(frozenset(op.id for op in first), loop.microbatching.joined, known, states)


def _with_barrier(
    graph: Graph, count: int, batch: dict[str, int], late: frozenset[str], wide: bool
) -> Microbatching | None:
    """The parts of a step whose examples meet once; None where they do not."""
    axis = MicrobatchAxis(pseudo_mesh(count))
    halves = _halves(graph, count, batch, late, axis, wide)
    if halves is None:
        return None
    s = halves.states
    after = [op for op in graph.operators if any(v.name in s.late for v in op.results)]
    read_late = names_read(after) | {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    joined = _joined(graph, halves, read_late)
    demand: dict[str, set[Layout]] = {j.name: {j.layout} for j in joined}
    body, outside, decisions = _body(graph, halves, demand, axis)
    if body is None:
        return None
    meets = {j.name for j in halves.joined}
    makers = closure(graph.operators, outside, given={*halves.known, *meets})
    of_meeting = {op.id for op in dependents(makers, {*halves.known, *meets})}
    before = [op for op in makers if op.id not in of_meeting]
    ready = {*names_made(before), *(j.name for j in joined)}
    inside = names_made(op for op in graph.operators if op.id in body)
    taken = demand.keys() & {*halves.known, *outside} - {*names_made(before), *inside}
    between = closure(graph.operators, taken, given=ready)
    met = [n for n in names_made(between) if n in taken]
    if not _ends_forward(graph, body, met):
        return None
    rest = closure(graph.operators, read_late - s.late, given=ready)
    ids = {op.id for op in (*after, *between, *rest)}
    return Microbatching(
        count,
        dict(batch),
        decisions.operands,
        decisions.results,
        tuple(op.id for op in before),
        tuple(op.id for op in graph.operators if op.id in body),
        tuple(op.id for op in graph.operators if op.id in ids),
        joined,
        entering(graph, (*names_made(before), *met), demand, {*outside, *met}),
        tuple(op.id for op in between),
        tuple(met),
    )


def _joined(graph: Graph, halves: _Halves, read_late: set[str]) -> tuple[Joined, ...]:
    """Values that leave the loop for the meeting, or for after all backward passes."""
    s = halves.states
    there = {j.name for j in halves.joined}
    more = [
        Joined(v.name, s.values[v.name])
        for op in graph.operators
        for v in op.results
        if v.name in read_late and v.name not in there | s.late | halves.known
        if not s.values[v.name].is_replicated
    ]
    return (*halves.joined, *more)


def _body(
    graph: Graph, halves: _Halves, demand: dict[str, set[Layout]], axis: MicrobatchAxis
) -> tuple[set[str] | None, dict[str, None], Decisions]:
    """Operators of the loop, what it takes from outside, and the layouts of its operators.

    The first is None where an operator takes examples and a sum that is not there before the meeting.
    """
    s, totals = halves.states, halves.totals
    decisions, body, outside = Decisions(), set[str](), dict[str, None]()
    for op in reversed(graph.operators):
        results = [v.name for v in op.results]
        if not any(n in demand for n in results) or any(n in s.late for n in results):
            continue
        if not halves.known.isdisjoint(results) and op.primitive != "broadcast_in_dim":
            continue
        of_total = op.id not in halves.first and not totals.isdisjoint(op.reads)
        if of_total and any(not s.values[n].is_replicated for n in results):
            return None, outside, decisions
        used = None if of_total else operand_layouts(graph, op, s, demand, axis, decisions)
        if used is None:  # a broadcast that is known is made in the loop all the same, where pieces of it do
            outside.update(dict.fromkeys(n for n in results if n in demand))
            continue
        body.add(op.id)
        for operand, type, k in zip(op.operands, graph.operand_types(op), used, strict=True):
            if isinstance(operand, str):
                demand.setdefault(operand, set()).add(k or whole(type))
    return body, outside, decisions


def _ends_forward(graph: Graph, body: set[str], met: list[str]) -> bool:
    """Whether no layer of the model is after where examples meet."""
    inside = [op for op in graph.operators if op.id in body]
    after = [op for op in dependents(inside, met) if phase_of(op) != "backward"]
    return not any(op.regions or op.primitive in CONTRACTIONS for op in after)
