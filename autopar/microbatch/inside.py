"""States of values inside loops and branches that run within one microbatch.

Nothing in a region can wait for other microbatches: where an operator would have to, the region as a whole mixes
them, and `region_states` answers None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cluster.mesh import LogicalMesh
from autopar.ir import Graph, Layout, Literal, Operand, Operator
from autopar.ir.fingerprint import structural_hash
from autopar.ir.loops import Scan, While
from autopar.ir.primitives import ALIASES, is_generator, is_zero
from autopar.microbatch.base import AXIS, split
from autopar.microbatch.match import Match, local_match, match, whole


@dataclass(frozen=True)
class MicrobatchAxis:
    """The axis of microbatches, and what was found out about regions on it.

    Args:
        mesh: of one axis, whose positions are the microbatches.
        known: by what a region is and what it is given, how it runs, and the layouts inside by id after the region's.
    """

    mesh: LogicalMesh
    known: dict[object, tuple[Match | None, Decisions]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return self.mesh.sizes[AXIS]


@dataclass
class Decisions:
    """For each operator of the loop over microbatches, by id, the layouts of its operands and results."""

    operands: dict[str, tuple[Layout | None, ...]] = field(default_factory=dict)
    results: dict[str, tuple[Layout, ...]] = field(default_factory=dict)

    def add(self, id: str, matched: Match) -> None:
        """Records the layouts of the operator ``id``."""
        self.operands[id], self.results[id] = matched.operands, matched.results


def states_of(operands: Sequence[Operand], states: dict[str, Layout]) -> list[Layout | None]:
    """State of each operand; None for literals."""
    return [None if isinstance(o, Literal) else states[o] for o in operands]


def is_whole(states: Sequence[Layout | None]) -> bool:
    """Whether none of them is split or partial."""
    return all(k is None or k.is_replicated for k in states)


def zeros_of(graph: Graph, op: Operator) -> list[bool]:
    """Whether each operand is a zero, written or made."""
    zeros = []
    for o in op.operands:
        producer = None if isinstance(o, Literal) else graph.producers.get(o)
        zeros.append(
            o.is_zero
            if isinstance(o, Literal)
            else producer is not None and is_generator(producer) and is_zero(producer)
        )
    return zeros


def region_states(
    graph: Graph, op: Operator, states: Sequence[Layout | None], id: str, axis: MicrobatchAxis, out: Decisions
) -> Match | None:
    """States of ``op``, a scan, while or cond, within one microbatch; None where it mixes microbatches.

    Of isomorphic regions, as the loops over the layers of each stage, one is looked into.

    Args:
        graph: the graph that ``op`` is in.
        op: the operator.
        states: state of each operand.
        id: its id with those of enclosing operators and regions.
        axis: the axis of microbatches.
        out: gets the layouts of the operators inside.
    """
    handler = {"scan": _scan, "while": _while, "cond": _cond}.get(op.primitive)
    if handler is None or op.effects:
        return None
    types = graph.operand_types(op)
    given = [whole(t) if k is None else k for k, t in zip(states, types, strict=True)]
    key = (structural_hash(op, types), tuple(_inner_ids(op)), tuple(given))
    if key not in axis.known:
        inside = Decisions()
        axis.known[key] = (handler(op, given, "", axis, inside), inside)
    matched, inside = axis.known[key]
    out.operands.update({f"{id}{inner}": k for inner, k in inside.operands.items()})
    out.results.update({f"{id}{inner}": k for inner, k in inside.results.items()})
    return matched


def _inner_ids(op: Operator) -> Iterator[str]:
    for _, region in op.regions:
        for inner in region.operators:
            yield inner.id
            yield from _inner_ids(inner)


def _forward(graph: Graph, inputs: Sequence[Layout], prefix: str, axis: MicrobatchAxis) -> dict[str, Layout] | None:
    """State of every value of a region's graph; None where an operator mixes."""
    states = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
    for op in graph.operators:
        operand_states = states_of(op.operands, states)
        if op.primitive in ALIASES:
            results: Sequence[Layout] = [
                whole(t) if k is None else k for k, t in zip(operand_states, graph.operand_types(op), strict=True)
            ]
        elif is_whole(operand_states):
            results = [whole(v.type) for v in op.results]
        elif op.regions:
            inner = region_states(graph, op, operand_states, f"{prefix}{op.id}", axis, Decisions())
            if inner is None:
                return None
            results = inner.results
        else:
            matched = match(op, graph.operand_types(op), operand_states, zeros_of(graph, op), axis.mesh, terms=True)
            if matched is None:
                return None
            results = matched.results
        states.update(zip((v.name for v in op.results), results, strict=True))
    return states


def _outputs(graph: Graph, states: dict[str, Layout]) -> list[Layout]:
    return [whole(o.type) if isinstance(o.operand, Literal) else states[o.operand] for o in graph.outputs]


def _decide(
    graph: Graph, states: dict[str, Layout], wanted: Sequence[Layout], prefix: str, axis: MicrobatchAxis, out: Decisions
) -> dict[str, set[Layout]]:
    """Records the layouts of a region's operators, readers first; returns those in which each value is read.

    What is the same in every microbatch, but only read in pieces, is made in pieces.
    """
    demand: dict[str, set[Layout]] = {}
    for o, k in zip(graph.outputs, wanted, strict=True):
        if isinstance(o.operand, str):
            demand.setdefault(o.operand, set()).add(k)
    for op in reversed(graph.operators):
        if is_generator(op):
            continue
        operand_states, types = states_of(op.operands, states), graph.operand_types(op)
        used: Sequence[Layout | None]
        if op.primitive in ALIASES:
            used = operand_states
        else:
            matched = _choose(graph, op, operand_states, demand, prefix, axis, out)
            out.add(f"{prefix}{op.id}", matched)
            used = matched.operands
        for operand, type, taken in zip(op.operands, types, used, strict=True):
            if isinstance(operand, str):
                demand.setdefault(operand, set()).add(taken or whole(type))
    return demand


def _narrowed(graph: Graph, inputs: Sequence[Layout], demand: dict[str, set[Layout]]) -> list[Layout]:
    """Operands of a region; a value that is the same in every microbatch is the piece that all readers take.

    So what makes it outside makes the piece alone: a mask for all examples, which jax takes out of a loop over layers,
    would have the size of the batch.
    """

    def one(name: str, state: Layout) -> Layout:
        wanted = demand.get(name, set())
        piece = next(iter(wanted)) if len(wanted) == 1 else state
        return piece if state.is_replicated and not piece.partial else state

    return [one(i.name, state) for i, state in zip(graph.inputs, inputs, strict=True)]


def _narrowed_match(
    handler: Callable[[Operator, list[Layout], str, MicrobatchAxis, Decisions], Match | None],
    op: Operator,
    states: Sequence[Layout],
    narrowed: list[Layout],
    id: str,
    axis: MicrobatchAxis,
    out: Decisions,
    plain: Match,
) -> Match:
    """``plain``, or what ``handler`` finds for the ``narrowed`` states if it makes the same of them."""
    if narrowed == list(states):
        return plain
    trial = Decisions()
    matched = handler(op, narrowed, id, axis, trial)
    if matched is None or matched.results != plain.results:
        return plain
    out.operands.update(trial.operands)
    out.results.update(trial.results)
    return matched


def _choose(
    graph: Graph,
    op: Operator,
    operand_states: Sequence[Layout | None],
    demand: dict[str, set[Layout]],
    prefix: str,
    axis: MicrobatchAxis,
    out: Decisions,
) -> Match:
    types = graph.operand_types(op)
    if op.regions:
        inner = region_states(graph, op, operand_states, f"{prefix}{op.id}", axis, out)
        assert inner is not None, f"{op.id} was found to run within a microbatch"
        return inner
    if not is_whole(operand_states):
        matched = match(op, types, operand_states, zeros_of(graph, op), axis.mesh, terms=True)
        assert matched is not None, f"{op.id} was found to run within a microbatch"
        return matched
    piece = only_piece(op, demand)
    local = None if piece is None else local_match(op, types, piece, axis.mesh)
    return local or Match(tuple(map(whole, types)), tuple(whole(v.type) for v in op.results))


def only_piece(op: Operator, demand: dict[str, set[Layout]]) -> Layout | None:
    """The layout over microbatches in which all readers take the only result of ``op``; None where they differ."""
    wanted = set().union(*(demand.get(v.name, set()) for v in op.results))
    piece = next(iter(wanted)) if len(wanted) == 1 else None
    return None if piece is None or piece.partial or piece.is_replicated else piece


def _joined(a: Layout, b: Layout) -> Layout | None:
    """The state that values in ``a`` and ``b`` can both be brought to; None if there is none."""
    if a == b or b.is_replicated:
        return a
    return b if a.is_replicated and (not b.partial or b.reduce == "sum") else None


def _scan(op: Operator, states: list[Layout], id: str, axis: MicrobatchAxis, out: Decisions) -> Match | None:
    scan = Scan.of(op)
    body, carries, first = scan.body, scan.num_carry, scan.num_whole
    consts, initial, stacks = scan.split(states)
    if any(k.dims[0] for k in stacks):
        return _scan_of_examples(op, states, id, axis, out)
    carry = initial
    while True:
        inputs = [*consts, *carry, *(k.slice() for k in stacks)]
        inner_states = _forward(body, inputs, f"{id}/body/", axis)
        if inner_states is None:
            return None
        results = _outputs(body, inner_states)
        joined = [_joined(a, b) for a, b in zip(carry, results, strict=False)]
        if any(k is None for k in joined):
            return None
        if joined == carry:
            break
        carry = [k for k in joined if k is not None]
    wanted = [*carry, *results[carries:]]
    demand = _decide(body, inner_states, wanted, f"{id}/body/", axis, out)
    plain = Match((*consts, *carry, *stacks), (*carry, *(k.stack() for k in results[carries:])))
    narrow = _narrowed(body, inputs, demand)
    narrowed = [*narrow[: scan.num_consts], *initial, *(k.stack() for k in narrow[first:])]
    return _narrowed_match(_scan, op, states, narrowed, id, axis, out, plain)


def _scan_of_examples(
    op: Operator, states: list[Layout], id: str, axis: MicrobatchAxis, out: Decisions
) -> Match | None:
    """A loop over the batch itself: `jax.lax.map`, or gradients accumulated over chunks.

    Each microbatch goes over its own slices. Nothing of one iteration may reach another but through sums: a carry is
    what it was, or is added to and read by nothing else.
    """
    scan = Scan.of(op)
    body = scan.body
    consts, initial, stacks = scan.split(states)
    over = [split(len(k.dims), 0) for k in stacks]
    if scan.length % axis.count or not is_whole(consts):
        return None
    if any(not k.is_replicated and k != wanted for k, wanted in zip(stacks, over, strict=True)):
        return None
    carry = []
    for n, state in enumerate(initial):
        given = len(consts) + n
        kept = before_barriers(body, body.outputs[n].operand) == body.inputs[given].name
        summed = state.is_replicated or (state.partial and not state.axes and state.reduce == "sum")
        if not (kept and state.is_replicated) and not (summed and is_sum(body, given, n)):
            return None
        carry.append(state if kept else Layout(state.dims, (AXIS,)))
    decide_whole(body, f"{id}/body/", out)
    results = [split(v.type.rank, 0) for v in op.results[len(carry) :]]
    return Match((*consts, *carry, *over), (*carry, *results))


def is_sum(body: Graph, given: int, result: int) -> bool:
    """Whether output ``result`` of a loop's body is its input ``given`` plus terms, and nothing else reads that."""
    readers: dict[str, list[Operator]] = {}
    for op in body.operators:
        for o in op.operands:
            if isinstance(o, str):
                readers.setdefault(o, []).append(op)
    name, end = body.inputs[given].name, body.outputs[result].operand
    others = [o.operand for n, o in enumerate(body.outputs) if n != result]
    while name != end:
        reading = readers.get(name, [])
        if len(reading) != 1 or reading[0].primitive not in ("add", "add_any", "optimization_barrier"):
            return False
        if name in others:
            return False
        barrier = reading[0].primitive == "optimization_barrier"
        name = reading[0].results[reading[0].operands.index(name) if barrier else 0].name
    return name not in others and not readers.get(name)


def before_barriers(graph: Graph, operand: Operand) -> Operand:
    """The value after the barriers that made ``operand``: jax puts them before recomputed operators."""
    while isinstance(operand, str):
        op = graph.producers.get(operand)
        if op is None or op.primitive != "optimization_barrier":
            break
        operand = op.operands[[v.name for v in op.results].index(operand)]
    return operand


def decide_whole(graph: Graph, prefix: str, out: Decisions) -> None:
    """Records for a graph and the regions in it that every operator runs as it is, on what it is given."""
    for op in graph.operators:
        types = graph.operand_types(op)
        out.add(f"{prefix}{op.id}", Match(tuple(map(whole, types)), tuple(whole(v.type) for v in op.results)))
        for name, region in op.regions:
            decide_whole(region, f"{prefix}{op.id}/{name}/", out)


def _while(op: Operator, states: list[Layout], id: str, axis: MicrobatchAxis, out: Decisions) -> Match | None:
    loop = While.of(op)
    cond, body = loop.cond, loop.body
    in_cond, in_body, initial = loop.split(states)
    carry = initial
    while True:
        inside = _forward(body, [*in_body, *carry], f"{id}/body/", axis)
        decided = _forward(cond, [*in_cond, *carry], f"{id}/cond/", axis)
        if inside is None or decided is None or not is_whole(_outputs(cond, decided)):
            return None
        joined = [_joined(a, b) for a, b in zip(carry, _outputs(body, inside), strict=True)]
        if any(k is None for k in joined):
            return None
        if joined == carry:
            break
        carry = [k for k in joined if k is not None]
    demand = _decide(body, inside, carry, f"{id}/body/", axis, out)
    _decide(cond, decided, _outputs(cond, decided), f"{id}/cond/", axis, out)
    plain = Match((*in_cond, *in_body, *carry), tuple(carry))
    narrow = _narrowed(body, [*in_body, *carry], demand)[: loop.body_consts]
    return _narrowed_match(_while, op, states, [*in_cond, *narrow, *initial], id, axis, out, plain)


def _cond(op: Operator, states: list[Layout], id: str, axis: MicrobatchAxis, out: Decisions) -> Match | None:
    if not states[0].is_replicated:
        return None
    by_branch = {name: _forward(branch, states[1:], f"{id}/{name}/", axis) for name, branch in op.regions}
    results = [whole(v.type) for v in op.results]
    for name, branch in op.regions:
        inside = by_branch[name]
        if inside is None:
            return None
        joined = [_joined(a, b) for a, b in zip(results, _outputs(branch, inside), strict=True)]
        if any(k is None for k in joined):
            return None
        results = [k for k in joined if k is not None]
    read = []
    for name, branch in op.regions:
        inside = by_branch[name]
        assert inside is not None
        demand = _decide(branch, inside, results, f"{id}/{name}/", axis, out)
        read.append(_narrowed(branch, states[1:], demand))
    # A branch that does not read it is given the piece that the others take.
    offered = [
        {k for k in narrow if k != state} for state, narrow in zip(states[1:], zip(*read, strict=True), strict=True)
    ]
    narrowed = [next(iter(k)) if len(k) == 1 else state for state, k in zip(states[1:], offered, strict=True)]
    return _narrowed_match(
        _cond, op, states, [states[0], *narrowed], id, axis, out, Match(tuple(states), tuple(results))
    )
