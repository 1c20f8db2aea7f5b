"""`operator_slice`: how one operator runs on a slice of tokens, from its sharding rule.

What a rule says of dims that may be split over devices holds for dims that slices split. A slice has two kinds of them:
rows, its own positions, and keys, all positions up to its own last one. An operator with two dims of tokens makes
scores; where their keys are reduced, entries with later keys must be what the reduction leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Graph, Literal, Operator, TensorType
from autopar.ir.primitives import CUMULATIVE
from autopar.microbatch.tokens.facts import Fact, combined, fact_of_literal
from autopar.microbatch.tokens.states import WHOLE, Fill, OperatorSlice, TokenState
from autopar.sharding import rule_for
from autopar.sharding.factors import Dims, Rule

#: What entries with later keys must be, by how keys are reduced.
_LEFT_OUT: Mapping[str, Fill] = {"sum": "zero", "max": "low", "min": "high", "or": "zero", "and": "one"}


@dataclass(frozen=True)
class Given:
    """Operands of an operator that is to run on one slice of the tokens of a sequence at a time.

    Args:
        types: shape and dtype of each operand.
        states: for each operand its dims of tokens, and whether a slice has its own positions or all up to them; None
            for literals.
        facts: for each operand what is known of its elements, as that later positions are 0; None where nothing is.
        backward: whether slices run from the last to the first.
        tokens: positions of a sequence.
    """

    types: tuple[TensorType, ...]
    states: tuple[TokenState | None, ...]
    facts: tuple[Fact | None, ...]
    backward: bool
    tokens: int

    @staticmethod
    def of(
        graph: Graph,
        op: Operator,
        states: Mapping[str, TokenState],
        facts: Mapping[str, Fact],
        backward: bool,
        tokens: int,
    ) -> Given:
        """The operands of an operator of a graph."""
        return Given(
            graph.operand_types(op),
            tuple(None if isinstance(o, Literal) else states[o] for o in op.operands),
            tuple(fact_of_literal(o) if isinstance(o, Literal) else facts.get(o) for o in op.operands),
            backward,
            tokens,
        )


def operator_slice(op: Operator, given: Given, transposed: set[str]) -> OperatorSlice | None:
    """How ``op`` runs on one slice of tokens, where some operand has dims of tokens; None where it cannot.

    Args:
        op: an operator without regions.
        given: what is known of its operands.
        transposed: ids of products whose rows and keys a later mask has shown to be swapped; more are added.
    """
    if op.effects or op.regions:
        return None
    if any(s is not None and s.terms for s in given.states):
        return _of_terms(op, given)
    if op.primitive in CUMULATIVE:
        along = _along(op, given)
        if along is not None:
            return along
    rule, _ = rule_for(op, given.types)
    places = _places(rule, given)
    if places is None:
        return None
    roles = _roles(op, places, transposed)
    if roles is None:
        return None
    rows, keys, product = roles
    if any(f is not None and not _is_of_tokens(rule, f, op, given) for f in (rows, keys)):
        return None
    operands = _taken(rule, given, rows, keys)
    fill = _fill(op, given, operands) if keys is not None else "any"
    if keys is not None and product and fill == "any":
        turned = _fill(op, given, _taken(rule, given, keys, rows))
        if turned != "any":
            transposed.symmetric_difference_update({product})
            rows, keys, fill, operands = keys, rows, turned, _taken(rule, given, keys, rows)
    return _results(op, rule, given, (rows, keys, fill, "" if fill != "any" else product), operands)


def spread_slice(op: Operator, given: Given) -> OperatorSlice | None:
    """How an operator that is linear in its rows runs on one slice of tokens, with zeros for all other positions.

    Its results are terms of sums over the slices: gradients of the first rows of a table of positions. None where it is
    not linear in them.
    """
    rows = [s is not None and s.rows is not None and s.keys is None and not s.terms for s in given.states]
    states = tuple(TokenState(terms="sum") if r else s for r, s in zip(rows, given.states, strict=True))
    if op.effects or op.regions or not any(rows):
        return None
    as_terms = _of_terms(op, replace(given, states=states))
    return None if as_terms is None else replace(as_terms, operands=given.states, spread=True)


def _of_terms(op: Operator, given: Given) -> OperatorSlice | None:
    """Terms of sums through an operator that is linear in them."""
    rule, _ = rule_for(op, given.types)
    terms = {i for i, s in enumerate(given.states) if s is not None and s.terms}
    others = [s for i, s in enumerate(given.states) if i not in terms and s is not None]
    if any(not s.is_whole for s in others) or {s.terms for s in given.states if s is not None and s.terms} != {"sum"}:
        return None
    for group in rule.linear:
        if terms <= set(group) and all(i in terms or _is_zero(given.facts[i]) for i in group):
            results = tuple(TokenState(terms="sum") for _ in op.results)
            return OperatorSlice(given.states, results)
    return None


def _is_zero(fact: Fact | None) -> bool:
    return fact is not None and fact.slope is not None and not any(fact.slope) and fact.base == 0


def _along(op: Operator, given: Given) -> OperatorSlice | None:
    """Running totals along the dim of tokens: those from the first position on in the forward pass, sums from the last
    position on in the backward pass."""
    (state,) = given.states
    if state is None or state.rows != op.integer("axis") or state.is_pair:
        return None
    if not op.attr("reverse"):
        return None if given.backward else OperatorSlice((TokenState(keys=state.rows),), (state,), tail=True)
    if not given.backward or op.primitive != "cumsum":
        return None
    return OperatorSlice((state,), (state,), owed=True, padded=True)


def _places(rule: Rule, given: Given) -> list[tuple[int | None, int | None, TokenState]] | None:
    """(factor of rows, factor of keys, state) of operands that are not whole; None where the rule keeps one whole."""
    places = []
    for dims, state in zip(rule.operands, given.states, strict=True):
        if state is None or state.is_whole:
            continue
        factors = [None if d is None else dims[d] for d in (state.rows, state.keys)]
        if any(f is None and d is not None for f, d in zip(factors, (state.rows, state.keys), strict=True)):
            return None
        places.append((factors[0], factors[1], state))
    return places


def _roles(
    op: Operator, places: Sequence[tuple[int | None, int | None, TokenState]], transposed: set[str]
) -> tuple[int, int | None, str] | None:
    """The factors that are rows and keys, and the product that made them as long as nothing said which are which."""
    pairs = sorted((p for p in places if p[2].is_pair), key=lambda p: bool(p[2].product))
    plain = list(dict.fromkeys(r for r, _, s in places if not s.is_pair and r is not None))
    if not pairs:
        if len(plain) > 2 or not plain:
            return None
        if len(plain) == 1:
            return plain[0], None, ""
        first, second = reversed(plain) if op.id in transposed else plain
        return first, second, op.id
    rows, keys, first_state = pairs[0]
    assert rows is not None and keys is not None
    for other_rows, other_keys, state in pairs[1:]:
        if (other_rows, other_keys) == (keys, rows) and state.product:
            transposed.symmetric_difference_update({state.product})
        elif (other_rows, other_keys) != (rows, keys):
            return None
    return (rows, keys, first_state.product) if set(plain) <= {rows, keys} else None


def _is_of_tokens(rule: Rule, factor: int, op: Operator, given: Given) -> bool:
    """Whether all dims that a factor labels are whole sequences, and no position reads those next to it."""
    if rule.factors[factor].halo is not None or rule.factors[factor].travels:
        return False
    types = (*given.types, *(v.type for v in op.results))
    labelled = zip((*rule.operands, *rule.results), types, strict=True)
    return all(n == given.tokens for dims, t in labelled for n, f in zip(t.shape, dims, strict=True) if f == factor)


def _dim(dims: Dims, factor: int | None) -> int | None:
    return dims.index(factor) if factor is not None and factor in dims else None


def _taken(rule: Rule, given: Given, rows: int | None, keys: int | None) -> tuple[TokenState | None, ...]:
    """State in which each operand is taken where two factors are rows and keys."""
    taken: list[TokenState | None] = []
    for dims, state, fact in zip(rule.operands, given.states, given.facts, strict=True):
        if state is None:
            taken.append(None)
            continue
        r, k = _dim(dims, rows), _dim(dims, keys)
        fill = state.fill if state.is_pair else "any" if fact is None else fact.fill(r, k)
        taken.append(TokenState(r, k, fill) if r is not None or k is not None else WHOLE)
    return tuple(taken)


def _fill(op: Operator, given: Given, operands: Sequence[TokenState | None]) -> Fill:
    """Kind of the entries with later keys in an operator's operand, before it reduces anything."""
    fills: list[Fill] = []
    for taken, state, fact in zip(operands, given.states, given.facts, strict=True):
        if state is not None and not state.is_whole:
            fills.append(taken.fill if taken is not None and taken.is_pair else "any")
        else:
            rows, keys = (None, None) if taken is None else (taken.rows, taken.keys)
            fills.append("any" if fact is None else fact.fill(rows, keys))
    return combined(op, fills)


def _results(
    op: Operator,
    rule: Rule,
    given: Given,
    roles: tuple[int | None, int | None, Fill, str],
    operands: tuple[TokenState | None, ...],
) -> OperatorSlice | None:
    rows, keys, fill, product = roles
    by_rows = None if rows is None else rule.factors[rows].reduce
    by_keys = None if keys is None else rule.factors[keys].reduce
    for factor in (rows, keys):
        needed = () if factor is None else rule.factors[factor].partial_operands
        if not all(_is_zero(given.facts[i]) for i in needed):
            return None
    if keys is not None and (by_keys or by_rows):
        kind = _LEFT_OUT.get(by_keys or "sum")
        if _reduced(op, fill, operands) != kind or (by_rows and by_rows != "sum"):
            return None
    states = []
    for dims in rule.results:
        r, k = _dim(dims, rows), _dim(dims, keys)
        if r is None and not by_rows:
            return None  # a result without the dim that is not reduced either
        if r is None and k is None:
            states.append(TokenState(terms=by_rows or ""))
        elif r is None:
            states.append(TokenState(rows=k))
        else:
            states.append(TokenState(r, k, fill if k is not None else "any", product=product if k is not None else ""))
    owed = bool(by_rows) and keys is not None and not by_keys
    if owed and not given.backward:
        return None
    return OperatorSlice(operands, tuple(states), owed=owed)


def _reduced(op: Operator, fill: Fill, operands: Sequence[TokenState | None]) -> Fill:
    """The kind of what is reduced: of a reduction its operand, of a product the product."""
    if op.primitive in ("dot_general", "mul"):
        return fill
    first = operands[0]
    return "any" if first is None else replace(first).fill
