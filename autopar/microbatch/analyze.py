"""`analyze`: what of a train step runs in each microbatch, and what once before and after.

Forward over the operators every value gets a state: the same in every microbatch (whole), split along a dim, a term of
a reduction (partial), or late: known after the last microbatch only. An operator runs in the loop if one of
the strategies of its rule takes its operands in their states (`autopar.microbatch.match`). One that cannot
waits for the loop to end, unless it depends on data alone (the count of unmasked tokens): then it runs before
the loop, on the whole batch. Where an operator of the backward pass would have to wait with examples in hand,
examples are mixed through parameters (batch norm, contrastive losses): `MicrobatchError`.

Then, backward over the operators, what the loop needs from outside is found; what is the same in every microbatch but
only read in pieces (random bits of dropout, a broadcast cotangent) is made in pieces in the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cost import total_flops
from autopar.errors import MicrobatchError
from autopar.ir import Graph, Layout, Literal, Operator, TensorType
from autopar.ir.analysis import closure, dependents, meeting_operator, names_made, names_read
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, CALLBACKS, is_generator
from autopar.microbatch.base import Joined, Microbatching, pseudo_mesh, split
from autopar.microbatch.inside import (
    Decisions,
    MicrobatchAxis,
    is_whole,
    only_piece,
    region_states,
    states_of,
    zeros_of,
)
from autopar.microbatch.match import Match, local_match, match, whole
from autopar.sharding import rule_for

_MODEL_ROLES = ("parameter", "optimizer")


@dataclass
class States:
    """For each value of a step how it depends on the microbatch: whole, split along a dim, or a term of a sum.

    ``late`` holds names of values that are known after the loop only, ``after_barrier`` those that come out of a
    barrier next to values of a microbatch: the same in every microbatch or not, they must not be asked for outside the
    loop, which would take the whole batch through the barrier.
    """

    values: dict[str, Layout] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    after_barrier: set[str] = field(default_factory=set)
    matches: dict[str, Match] = field(default_factory=dict)
    mixing: list[Operator] = field(default_factory=list)


def batch_size(graph: Graph, dim: int = 0) -> int | None:
    """Size of ``dim`` of most batch inputs, the largest of several; None if no batch input has that dim."""
    sizes = Counter(i.type.shape[dim] for i in graph.inputs if i.role == "batch" and i.type.rank > dim)
    return max(sizes, key=lambda n: (sizes[n], n)) if sizes else None


def even_counts(graph: Graph) -> list[int]:
    """Powers of two, rising from 1, that divide the batch of a step; 1 alone of a step without one."""
    size = batch_size(graph) or 1
    return [n for k in range(size.bit_length()) if size % (n := 2**k) == 0]


def analyze(graph: Graph, count: int, late: frozenset[str] = frozenset()) -> Microbatching:
    """Analyzes ``graph`` in ``count`` microbatches.

    Prints, and callbacks whose results nothing needs, run nowhere: `analyze_in_loops` has them run after the last loop.

    Args:
        graph: a traced train step with roles.
        count: number of equal microbatches. With 1 the loop holds the forward and the backward pass, and what is
            joined is whole.
        late: ids of operators that are to run after the loop though they could run in it.

    Raises:
        MicrobatchError: there is no batch, ``count`` does not divide it, or examples are mixed. The message of the
            last names the operator that would need all microbatches, with the user's line.
    """
    graph = _without_unread_effects(graph)
    if count == 1:
        return _once(graph, late)
    errors = []
    for dim in (0, 1):
        batch = examples(graph, count, dim)
        if batch is None:
            errors.append(_uneven(graph, batch_size(graph, dim), count))
            continue
        try:
            microbatching = _analyze(graph, count, batch, late)
        except MicrobatchError as error:
            errors.append(error)
            continue
        # A dim that is none of examples mixes at once: a loop of nothing is no division of the step.
        if microbatching.body or not errors:
            return microbatching
    raise errors[0]


def _without_unread_effects(graph: Graph) -> Graph:
    if not any(op.effects for op in graph.operators):
        return graph
    needed = {op.id for op in closure(graph.operators, [o.operand for o in graph.outputs])}
    return replace(graph, operators=tuple(op for op in graph.operators if not op.effects or op.id in needed))


def examples(graph: Graph, count: int, dim: int) -> dict[str, int] | None:
    """Inputs that microbatches split, with the dim; None where they do not divide the batch.

    Args:
        graph: a traced train step with roles.
        count: number of microbatches.
        dim: of the batch, in each input.
    """
    size = batch_size(graph, dim)
    if size is None or size % count or size < count:
        return None
    return {i.name: dim for i in graph.inputs if i.role == "batch" and i.type.rank > dim and i.type.shape[dim] == size}


def _uneven(graph: Graph, size: int | None, count: int) -> MicrobatchError:
    if size is None:
        return MicrobatchError(
            f"{graph.name} has no batch argument to split into {count} microbatches",
            cause="every array argument is state that comes back, or a key, or a scalar",
            remedy="name the batch in batch_argnums, or use num_microbatches=1",
        )
    possible = [n for n in range(2, size + 1) if size % n == 0]
    return MicrobatchError(
        f"{count} microbatches do not divide the batch of {size} of {graph.name}",
        remedy=f"num_microbatches={', '.join(map(str, possible[:8])) or 1}" + (" ..." if len(possible) > 8 else ""),
    )


def _analyze(graph: Graph, count: int, batch: Mapping[str, int], late: frozenset[str]) -> Microbatching:
    axis = MicrobatchAxis(pseudo_mesh(count))
    states = forward_states(graph, batch, axis, late)
    _check_mixing(graph, states)
    return collect(graph, count, batch, states, axis)


def _once(graph: Graph, late: frozenset[str]) -> Microbatching:
    """The parts of a step that runs at once: the loop has what depends on the batch, up to the update."""
    of_batch = dependents(graph.operators, (i.name for i in graph.inputs if i.role == "batch"))
    trains = any(phase_of(op) != "update" for op in graph.operators)
    first_after = {op.id for op in of_batch if op.id in late or (trains and phase_of(op) == "update")}
    late_ops = [op for op in dependents(graph.operators, (), also=lambda op: op.id in first_after) if op.results]
    after = set(names_made(late_ops))
    runs_after = {op.id for op in late_ops}
    inside = {op.id: op for op in of_batch if op.id not in runs_after}
    outputs = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    read = names_read(late_ops) | outputs
    joined = [Joined(v.name, whole(v.type)) for op in inside.values() for v in op.results if v.name in read]
    computed = {v.name for op in inside.values() for v in op.results}
    body = [op for op in closure(graph.operators, [j.name for j in joined]) if op.id in inside]
    inputs = {i.name for i in graph.inputs}
    outside = names_read(body) - computed
    before = closure(graph.operators, outside - inputs)
    ready = set(names_made(before)) | {j.name for j in joined}
    rest = closure(graph.operators, read - after, given=ready)
    late_ids = {op.id for op in (*rest, *late_ops)}
    local = {op.id: op.results[0].name for op in before if is_generator(op) and op.results[0].name in outside}
    in_body = {op.id for op in body} | local.keys()
    taken = [n for n in [*(i.name for i in graph.inputs), *names_made(before)] if n in outside]
    return Microbatching(
        1,
        {i.name: 0 for i in graph.inputs if i.role == "batch" and i.name in outside},
        {},
        {},
        tuple(op.id for op in before),
        tuple(op.id for op in graph.operators if op.id in in_body),
        tuple(op.id for op in graph.operators if op.id in late_ids),
        tuple(joined),
        tuple(n for n in taken if n not in local.values()),
    )


def forward_states(graph: Graph, batch: Mapping[str, int], axis: MicrobatchAxis, late: frozenset[str]) -> States:
    """Finds for each value how it depends on the microbatch, from the inputs forward.

    Args:
        graph: a traced train step with roles.
        batch: inputs that are split, with the dim.
        axis: of microbatches.
        late: ids of operators that wait though they need not.
    """
    s = States()
    of_data: set[str] = {i.name for i in graph.inputs if i.role not in _MODEL_ROLES}
    for i in graph.inputs:
        s.values[i.name] = split(i.type.rank, batch[i.name]) if i.name in batch else whole(i.type)
    for op in graph.operators:
        names = op.reads
        results = [v.name for v in op.results]
        data = all(n in of_data for n in names)
        if data:
            of_data.update(results)
        if op.id in late or any(n in s.late for n in names):
            _wait(op, s)
            continue
        states = states_of(op.operands, s.values)
        known_results = in_loop_states(graph, op, states, s, axis)
        if known_results is None and data:
            known_results = tuple(whole(v.type) for v in op.results)
        if known_results is None:
            _wait(op, s)
        else:
            s.values.update(zip(results, known_results, strict=True))
            mixed = op.primitive == "optimization_barrier" and not is_whole(states)
            if mixed or not s.after_barrier.isdisjoint(names):
                s.after_barrier.update(results)
    return s


def in_loop_states(
    graph: Graph, op: Operator, states: list[Layout | None], s: States, axis: MicrobatchAxis
) -> tuple[Layout, ...] | None:
    """How the results of ``op`` depend on the microbatch; None where it needs the examples of all microbatches.

    Args:
        graph: that it is in.
        op: the operator.
        states: of its operands; None for literals.
        s: states of the values so far, to which it adds.
        axis: of microbatches.
    """
    if is_whole(states):
        return tuple(whole(v.type) for v in op.results)
    terms_only = all(k is None or not k.axes for k in states)
    if terms_only and phase_of(op) == "update" and op.primitive != "optimization_barrier":
        return None  # what is done to gradients once need not be done to each of their terms
    if op.primitive in ALIASES:
        return tuple(k for k in states if k is not None)
    if op.regions:
        matched = region_states(graph, op, states, op.id, axis, Decisions())
    else:
        matched = match(op, graph.operand_types(op), states, zeros_of(graph, op), axis.mesh)
    if matched is None:
        return None
    s.matches[op.id] = matched
    return matched.results


def _wait(op: Operator, s: States) -> None:
    s.late.update(v.name for v in op.results)
    if any(s.values[o].axes for o in op.reads if o not in s.late):
        s.mixing.append(op)


def is_mixed(graph: Graph, s: States) -> bool:
    """Whether some operator on single examples depends on all of them, so that it would run after the loop.

    Args:
        graph: a traced train step.
        s: of its values.
    """
    if any(phase_of(op) == "backward" for op in s.mixing):
        return True
    if not any(phase_of(op) != "update" for op in s.mixing):
        return False
    # Metrics over the whole batch may wait; a model that does must not.
    flops = {op.id: total_flops(graph, op) for op in graph.operators}
    late = sum(flops[op.id] for op in graph.operators if any(v.name in s.late for v in op.results))
    return late > 0.5 * sum(flops.values())


def _check_mixing(graph: Graph, s: States) -> None:
    """Raises MicrobatchError where work on examples would have to wait for the end of the loop."""
    if not is_mixed(graph, s):
        return
    first = s.mixing[0]
    culprit = next(
        (graph.producers[o] for o in first.reads if o in s.late and o in graph.producers and graph.producers[o].source),
        first,
    )
    root = meeting_operator(graph, culprit, s.late, lambda n: n not in s.late and bool(s.values[n].partial))
    why = reason(root, graph.operand_types(root))
    raise MicrobatchError(
        f"{root.primitive} needs the examples of all microbatches, and what follows needs its result for each example",
        cause=why.cause,
        remedy=why.remedy,
        source=root.source or first.source or None,
    )


def collect(graph: Graph, count: int, batch: Mapping[str, int], s: States, axis: MicrobatchAxis) -> Microbatching:
    """The operators before, in and after the loop over microbatches, as outputs and operators after the loop need them.

    Args:
        graph: a traced train step with roles.
        count: number of microbatches.
        batch: inputs that are split, with the dim.
        s: states of all values.
        axis: of microbatches.
    """
    after = [op for op in graph.operators if any(v.name in s.late for v in op.results)]
    read_late = names_read(after) | {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    joined = [
        Joined(v.name, s.values[v.name])
        for op in graph.operators
        for v in op.results
        if v.name in read_late and v.name not in s.late and not s.values[v.name].is_replicated
    ]
    demand: dict[str, set[Layout]] = {j.name: {j.layout} for j in joined}
    decisions, body = Decisions(), list[str]()
    outside: dict[str, None] = {}
    for op in reversed(graph.operators):
        results = [v.name for v in op.results]
        if not any(n in demand for n in results) or any(n in s.late for n in results):
            continue
        used = operand_layouts(graph, op, s, demand, axis, decisions)
        if used is None:
            outside.update(dict.fromkeys(n for n in results if n in demand))
            continue
        body.append(op.id)
        for operand, type, k in zip(op.operands, graph.operand_types(op), used, strict=True):
            if isinstance(operand, str):
                demand.setdefault(operand, set()).add(k or whole(type))
    before = closure(graph.operators, outside)
    ready = {*names_made(before), *(j.name for j in joined)}
    late_ids = {op.id for op in after}
    late_only = closure(graph.operators, read_late - s.late, given=ready)
    order = {op.id: n for n, op in enumerate(graph.operators)}
    return Microbatching(
        count,
        dict(batch),
        decisions.operands,
        decisions.results,
        tuple(op.id for op in before),
        tuple(reversed(body)),
        tuple(sorted([*late_ids, *(op.id for op in late_only)], key=lambda id: order[id])),
        tuple(joined),
        entering(graph, names_made(before), demand, outside),
    )


def entering(graph: Graph, ready: Iterable[str], demand: Container[str], outside: Container[str]) -> tuple[str, ...]:
    """Names of what a loop over microbatches takes: inputs of the graph, and values that are made before it.

    Args:
        graph: the step.
        ready: values that are there before the loop, in order.
        demand: what its operators read.
        outside: values that are not made in it.
    """
    inputs = {i.name: None for i in graph.inputs}
    return tuple(n for n in (*inputs, *ready) if n in demand and (n in inputs or n in outside))


def operand_layouts(
    graph: Graph,
    op: Operator,
    s: States,
    demand: dict[str, set[Layout]],
    axis: MicrobatchAxis,
    out: Decisions,
) -> tuple[Layout | None, ...] | None:
    """Layouts of the operands of ``op`` if it runs in the loop (recorded in ``out``); None if it runs before it.

    Args:
        graph: that it is in.
        op: the operator.
        s: states of all values.
        demand: by value the layouts in which the loop reads it.
        axis: of microbatches.
        out: where its layouts are kept.
    """
    if is_generator(op):
        return tuple(None for _ in op.operands)
    states = [None if isinstance(o, Literal) else s.values[o] for o in op.operands]
    mixed = any(not s.values[v.name].is_replicated for v in op.results)
    if op.primitive in ALIASES:
        return tuple(states) if mixed else None
    if mixed or op.id in s.matches:
        matched = s.matches[op.id]
        if op.regions:
            matched_again = region_states(graph, op, states, op.id, axis, out)
            assert matched_again is not None
        out.add(op.id, matched)
        return matched.operands
    piece = only_piece(op, demand)
    local = None if piece is None else local_match(op, graph.operand_types(op), piece, axis.mesh)
    if local is not None and all(
        k is None or k.is_replicated or k == wanted for k, wanted in zip(states, local.operands, strict=True)
    ):
        out.add(op.id, local)
        return local.operands
    if s.after_barrier.isdisjoint(op.reads) or op.effects:
        return None
    if op.regions:
        matched_again = region_states(graph, op, states, op.id, axis, out)
        if matched_again is None:
            return None
        out.add(op.id, matched_again)
        return matched_again.operands
    if not is_whole(states):
        return None  # of pieces, and yet not in the loop: it takes all examples
    types = graph.operand_types(op)
    every = Match(tuple(map(whole, types)), tuple(whole(v.type) for v in op.results))
    out.add(op.id, every)
    return every.operands


_LOOPS = ("scan", "while")
_ORDERING = ("sort", "approx_top_k", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev")
_RESHAPING = (
    "reshape", "slice", "concatenate", "pad", "roll", "dynamic_slice", "dynamic_update_slice", "gather", "squeeze",
)  # fmt: skip
_WHOLE = "num_microbatches=1"


@dataclass(frozen=True)
class Reason:
    """Text of an error: the usual cause, and what the user can do."""

    cause: str
    remedy: str


def reason(op: Operator, types: tuple[TensorType, ...]) -> Reason:
    """Why ``op``, whose operands have ``types``, needs the examples of all microbatches."""
    if op.primitive in CALLBACKS:
        return Reason(
            f"{op.primitive} calls a Python function with whole arrays; that function could mix examples",
            f"jax operators in its place, a custom call with a rule, or {_WHOLE}",
        )
    if not op.regions and not rule_for(op, types)[1]:
        return Reason(
            f"{op.primitive} has no sharding rule, so it cannot be told whether it mixes examples",
            f'autopar.sharding.register_rule("{op.primitive}", ...), which says how it may be split, or {_WHOLE}',
        )
    if op.primitive in _LOOPS:
        return Reason(
            "a loop that carries more than sums from one example, or one chunk of the batch, to the next; or chunks "
            "whose number the microbatches do not divide",
            f"jax.vmap over examples, a loop that only adds to what it carries, or {_WHOLE}",
        )
    if op.primitive == "cond":
        return Reason(
            "a branch that mixes examples; or a predicate that depends on them; or, inside another cond, branches that "
            "save an array over examples and a parameter of the same shape, which jax keeps in one buffer",
            f"jnp.where in place of jax.lax.cond, a batch size that is no size of a parameter, or {_WHOLE}",
        )
    if op.primitive in _ORDERING:
        return Reason(
            "an order or a running total over the examples of the batch",
            f"the same within groups of examples (jax.vmap over groups), or {_WHOLE}",
        )
    if op.primitive in _RESHAPING:
        return Reason(
            "examples that are regrouped, shifted, cut off or merged with another dim, so that those of one "
            "microbatch no longer lie together",
            f"the dim of examples first in a merge, kept apart by jax.vmap, or {_WHOLE}",
        )
    return Reason(
        "a statistic over the batch that depends on parameters (batch norm, a contrastive loss, a loss that is "
        "balanced over all tokens)",
        f"num_stages=1, which runs a step with few of these in several loops, {_WHOLE}, or a statistic over a part of "
        "the batch (group norm, groups of tokens)",
    )
