"""`analyze_tokens`: the proof that position i of a sequence reads only positions up to i, and how slices run.

Forward over the operators every value gets a `TokenState`, found from the sharding rules
(`autopar.microbatch.tokens.operators`). TeraPipe (Li et al., ICML'21, section 3.2) needs the proof: a stage passes on
a slice before it has seen the next one, keeps the keys and values of earlier slices, and in the backward pass, which
goes from the last slice to the first, adds up what later slices owe to them.

An operator that fits no rule waits for all slices. What waits is the update, a metric, or of data alone; where work of
the forward or backward pass would have to wait, positions are mixed: `SliceError` with the user's line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost import total_flops
from autopar.errors import SliceError
from autopar.ir import Graph, Operator
from autopar.ir.analysis import closure, meeting_operator, names_read
from autopar.ir.phases import RECOMPUTED, phase_of
from autopar.ir.primitives import ALIASES, CUMULATIVE
from autopar.microbatch.tokens.facts import Fact, fact_of
from autopar.microbatch.tokens.operators import Given, operator_slice, spread_slice
from autopar.microbatch.tokens.states import WHOLE, OperatorSlice, TokenSlicing, TokenState

_MODEL_ROLES = ("parameter", "optimizer")
#: Work that waits for all slices, as a share of the forward and backward pass.
_MOST_LATE = 0.01
_ROUNDS = 8


@dataclass
class _Found:
    """Result of one walk. Operators in ``mixing`` wait though a slice has their operands."""

    states: dict[str, TokenState] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    operators: dict[str, OperatorSlice] = field(default_factory=dict)
    descending: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    mixing: list[Operator] = field(default_factory=list)


@dataclass(frozen=True)
class TokenStart:
    """Inputs of a step that runs slice by slice over the tokens of its sequences.

    Args:
        tokens: positions of a sequence.
        inputs: by name of an input that every slice reads whole the dim of it that is one of tokens.
        states: for each input its dims of tokens, and which positions a slice has.
        data: inputs that depend on the batch alone.
        facts: what is known of the elements of inputs that do not depend on the batch, as masks.
    """

    tokens: int
    inputs: Mapping[str, int]
    states: Mapping[str, TokenState]
    data: frozenset[str]
    facts: Mapping[str, Fact]


def token_count(graph: Graph, dim: int = 1) -> int | None:
    """Size of ``dim`` of most batch inputs, the largest of several; None where no batch input has that dim."""
    sizes = Counter(i.type.shape[dim] for i in graph.inputs if i.role == "batch" and i.type.rank > dim)
    return max(sizes, key=lambda n: (sizes[n], n)) if sizes else None


def analyze_tokens(graph: Graph, dim: int = 1) -> TokenSlicing:
    """Analyzes ``graph`` in slices of tokens.

    Args:
        graph: a traced train step with roles.
        dim: the dim of batch inputs that is one of tokens.

    Raises:
        SliceError: no batch input has that dim, or a position reads later ones. The message names the operator and
            the user's line.
    """
    tokens = token_count(graph, dim)
    if tokens is None or tokens < 2:
        raise SliceError(
            f"{graph.name} has no batch argument with a dim {dim} of tokens",
            cause="arguments without sequences, or sequences that are not batch arguments",
            remedy="token_slices=None, or tokens and labels as [batch, tokens] arrays of their own",
        )
    inputs = {
        i.name: dim for i in graph.inputs if i.role == "batch" and i.type.rank > dim and i.type.shape[dim] == tokens
    }
    states = {i.name: TokenState(rows=inputs[i.name]) if i.name in inputs else WHOLE for i in graph.inputs}
    data = frozenset(i.name for i in graph.inputs if i.role not in _MODEL_ROLES)
    return analyze_from(graph, TokenStart(tokens, inputs, states, data, {}))


def analyze_from(graph: Graph, start: TokenStart) -> TokenSlicing:
    """Analyzes a graph in slices, from known states of its inputs.

    Args:
        graph: a step, or the body of a loop over microbatches.
        start: what is known.

    Raises:
        SliceError: a position reads later ones.
    """
    transposed: set[str] = set()
    for _ in range(_ROUNDS):
        before = frozenset(transposed)
        walked = _walk(graph, start, transposed)
        if transposed == before:
            break
    _check_mixing(graph, walked)
    return _collected(graph, start.inputs, start.tokens, walked)


def facts_of(graph: Graph, tokens: int, ids: frozenset[str]) -> dict[str, Fact]:
    """Facts about results of some operators of a graph, of whose inputs nothing is known."""
    f = _Found(states={i.name: WHOLE for i in graph.inputs})
    for op in graph.operators:
        if op.id in ids and all(n in f.states for n in op.reads):
            _whole(graph, op, tokens, f)
    return f.facts


def _walk(graph: Graph, start: TokenStart, transposed: set[str]) -> _Found:
    tokens = start.tokens
    f = _Found(dict(start.states), dict(start.facts))
    of_data = set(start.data)
    ends = _ends(graph)
    for op in graph.operators:
        results = [v.name for v in op.results]
        data = all(n in of_data for n in op.reads)
        if data:
            of_data.update(results)
        if any(n in f.late for n in op.reads):
            _wait(op, f)
            continue
        if all(f.states[n].is_whole for n in op.reads):
            _whole(graph, op, tokens, f)
            continue
        backward = phase_of(op) == "backward" or not f.descending.isdisjoint(op.reads)
        slice_ = _sliced(graph, op, backward, tokens, f, transposed)
        if slice_ is None and backward and ends.issuperset(results):
            slice_ = spread_slice(op, Given.of(graph, op, f.states, f.facts, backward, tokens))
        if slice_ is not None and not _in_order(op, slice_, f):
            slice_ = None
        if slice_ is None and data:
            _whole(graph, op, tokens, f)
        elif slice_ is None:
            _wait(op, f)
        else:
            f.operators[op.id] = slice_
            f.states.update(zip(results, slice_.results, strict=True))
            if backward:
                f.descending.update(results)
    return f


def _ends(graph: Graph) -> frozenset[str]:
    """Results that only updates and the caller read: gradients at their end."""
    read = names_read(op for op in graph.operators if phase_of(op) != "update")
    return frozenset(v.name for op in graph.operators for v in op.results if v.name not in read)


def _whole(graph: Graph, op: Operator, tokens: int, f: _Found) -> None:
    """An operator whose results all slices share."""
    f.whole.add(op.id)
    f.states.update((v.name, WHOLE) for v in op.results)
    given = Given.of(graph, op, f.states, f.facts, False, tokens)
    fact = fact_of(op, given.types, given.facts, tokens)
    if fact is not None:
        f.facts[op.results[0].name] = fact


def _sliced(
    graph: Graph, op: Operator, backward: bool, tokens: int, f: _Found, transposed: set[str]
) -> OperatorSlice | None:
    given = Given.of(graph, op, f.states, f.facts, backward, tokens)
    if op.primitive in ALIASES:
        return OperatorSlice(given.states, tuple(s or WHOLE for s in given.states))
    if phase_of(op) == "update" and all(s is None or s.is_whole or s.terms for s in given.states):
        return None  # what is done to gradients once need not be done to each of their terms
    return operator_slice(op, given, transposed)


def _in_order(op: Operator, slice_: OperatorSlice, f: _Found) -> bool:
    """Whether earlier slices have been where the operator reads their rows: not of what goes backward."""
    for name, taken in zip(op.operands, slice_.operands, strict=True):
        if isinstance(name, str) and _reads_earlier(f.states[name], taken) and name in f.descending:
            return False
    return True


def _reads_earlier(state: TokenState, taken: TokenState | None) -> bool:
    """Whether an operator reads rows of earlier slices of a value in ``state``."""
    return taken is not None and taken.keys is not None and state.keys is None and state.rows == taken.keys


def _wait(op: Operator, f: _Found) -> None:
    f.late.update(v.name for v in op.results)
    if any(n not in f.late and not f.states[n].is_whole and not f.states[n].terms for n in op.reads):
        f.mixing.append(op)


def _check_mixing(graph: Graph, f: _Found) -> None:
    """Raises SliceError where work of the forward or backward pass would have to wait for all slices."""
    if not f.mixing:
        return
    flops = {op.id: total_flops(graph, op) for op in graph.operators if phase_of(op) != "update"}
    late = sum(flops[op.id] for op in graph.operators if op.id in flops and any(v.name in f.late for v in op.results))
    if late <= _MOST_LATE * sum(flops.values()):
        return
    root = meeting_operator(graph, f.mixing[0], f.late, lambda n: n in f.states and bool(f.states[n].terms))
    raise SliceError(
        f"{root.primitive} reads later positions of the sequence, or nothing proves that it does not",
        cause=_cause(root, f),
        remedy="a causal mask before the softmax, or token_slices=None",
        source=root.source or None,
    )


def _cause(op: Operator, f: _Found) -> str:
    states = [f.states[n] for n in op.reads if n in f.states]
    if any(s.is_pair for s in states):
        return "scores of a position with later ones that no causal mask leaves out"
    if op.regions:
        return "a loop or a branch over layers, which is not cut into slices: write layers one after another"
    if op.primitive in CUMULATIVE:
        return "a running total from the last position to the first"
    if RECOMPUTED in op.marks:
        return "jax.checkpoint, of whose values earlier slices have none left: leave recomputation to the plan"
    if op.primitive.startswith("reduce_") or op.primitive in ("argmax", "argmin"):
        return "a statistic over the positions of a sequence"
    return "positions that are shifted, merged with another dim, sorted, or convolved"


def _collected(graph: Graph, inputs: Mapping[str, int], tokens: int, f: _Found) -> TokenSlicing:
    """The part of a walk's result that the caller needs."""
    after = [op for op in graph.operators if any(v.name in f.late for v in op.results) or not op.results]
    read_late = names_read(after) | {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    names = [v.name for op in graph.operators for v in op.results]
    joined = [n for n in names if n in read_late and n in f.states and n not in f.late and not f.states[n].is_whole]
    body = closure(graph.operators, joined, within=lambda op: op.id in f.operators)
    shared = names_read(body) | {n for n in read_late if n not in f.late}
    whole = closure(graph.operators, {n for n in shared if n in f.states and f.states[n].is_whole})
    pairs = [(n, t) for op in body for n, t in zip(op.operands, f.operators[op.id].operands, strict=True)]
    kept = {n for n, t in pairs if isinstance(n, str) and n not in inputs and _reads_earlier(f.states[n], t)}
    late_ids = {op.id for op in after}
    return TokenSlicing(
        tokens,
        dict(inputs),
        f.states,
        {op.id: f.operators[op.id] for op in body},
        tuple(op.id for op in body if f.descending.isdisjoint(v.name for v in op.results)),
        tuple(op.id for op in body if not f.descending.isdisjoint(v.name for v in op.results)),
        tuple(op.id for op in whole),
        tuple(op.id for op in graph.operators if op.id in late_ids),
        tuple(joined),
        tuple(n for n in names if n in kept),
        tuple(v.name for op in body if f.operators[op.id].owed for v in op.results),
    )
