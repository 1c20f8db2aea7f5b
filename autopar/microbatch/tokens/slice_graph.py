"""`slice_graph`: what one slice of tokens computes, as a graph of its own.

Every operator of the loop has the rows of its slice. Between operators are few further ones: what all slices share is
cut, rows of earlier slices are put before a slice's own, and what later slices owe is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.errors import SliceError
from autopar.ir import Graph, Input, Literal, Operand, Operator, Output, TensorType, Value
from autopar.ir.analysis import closure
from autopar.ir.graph import Attr
from autopar.microbatch.tokens.states import OperatorSlice, TokenSlicing, TokenState


@dataclass(frozen=True)
class TokenSlices:
    """A sequence cut into slices.

    Args:
        lengths: tokens of each, from the first.
    """

    lengths: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self.lengths)

    def start(self, k: int) -> int:
        """First token of slice k."""
        return sum(self.lengths[:k])

    def end(self, k: int) -> int:
        """First token after slice k."""
        return self.start(k) + self.lengths[k]

    def size(self, type: TensorType, state: TokenState, k: int) -> TensorType:
        """The type of what slice k has of a value of ``type`` in ``state``."""
        shape = list(type.shape)
        if state.rows is not None:
            shape[state.rows] = self.lengths[k]
        if state.keys is not None:
            shape[state.keys] = self.end(k)
        return replace(type, shape=tuple(shape))


def check_lengths(lengths: Sequence[int], tokens: int) -> TokenSlices:
    """The slices of these lengths.

    Raises:
        SliceError: they do not add up to the tokens of a sequence, or one is not positive.
    """
    if not lengths or min(lengths) < 1 or sum(lengths) != tokens:
        near = list(accumulate(lengths)) if lengths else []
        raise SliceError(
            f"slices of {', '.join(map(str, lengths)) or 'no'} tokens are not a sequence of {tokens}",
            cause=f"they end at {near[-1]}" if near else None,
            remedy=f"positive lengths with the sum {tokens}",
        )
    return TokenSlices(tuple(lengths))


def rows_of(name: str, k: int) -> str:
    """Name of the rows of a value that slice k has."""
    return f"{name}[{k}]"


def spread_of(name: str, k: int) -> str:
    """Name of the rows of a value that slice k has, with zeros for all other positions: a term of the whole value."""
    return f"{name}[spread by {k}]"


def owed_to(name: str, k: int) -> str:
    """Name of the terms of a value that slices from k on have computed for earlier ones, as gradients of keys."""
    return f"{name}[owed by {k}]"


@dataclass(frozen=True)
class SliceGraph:
    """One slice's part of a graph.

    Args:
        graph: inputs are values that all slices share under their own names, `rows_of` this and earlier slices, and
            what is `owed_to` this one by the next.
        origins: for operators of the slice the id of the operator that they are a slice of; further ones are left out.
        cuts: for further operators the value whose layout they have.
        sources: for inputs that are of a slice (value, number of the slice); for those `owed_to` it that of the next.
    """

    graph: Graph
    origins: Mapping[str, str]
    cuts: Mapping[str, str]
    sources: Mapping[str, tuple[str, int]]


def slice_graph(
    graph: Graph,
    slicing: TokenSlicing,
    slices: TokenSlices,
    k: int,
    ids: Iterable[str],
    wanted: Sequence[str],
    given: Iterable[str] = (),
    spread: Iterable[str] = (),
) -> SliceGraph:
    """The graph of slice k.

    Args:
        graph: the whole graph.
        slicing: its analysis.
        slices: the cut of a sequence.
        k: number of the slice.
        ids: operators of the loop that may run; what others make is taken.
        wanted: values of the loop that are asked for; where the slice owes terms of one to earlier slices these come
            too, after the wanted.
        given: values that all slices share and that are taken; others are made.
        spread: those wanted values with rows that come with zeros for all other positions, as `spread_of` names them.
    """
    builder = _Builder(graph, slicing, slices, k, frozenset(given))
    allowed = frozenset(ids)
    for op in closure(graph.operators, wanted, within=lambda op: op.id in allowed):
        builder.add(op, slicing.operators[op.id])
    return builder.built(wanted, frozenset(spread))


class _Builder:
    """The operators so far."""

    def __init__(self, graph: Graph, slicing: TokenSlicing, slices: TokenSlices, k: int, given: frozenset[str]) -> None:
        self.whole, self.slicing, self.slices, self.k, self.given = graph, slicing, slices, k, given
        self.inputs: dict[str, Input] = {}
        self.operators: list[Operator] = []
        self.types: dict[str, TensorType] = {}
        self.origins: dict[str, str] = {}
        self.cuts: dict[str, str] = {}
        self.sources: dict[str, tuple[str, int]] = {}
        self.owes: list[str] = []
        self.roles = {i.name: i.role for i in graph.inputs}

    def built(self, wanted: Sequence[str], spread: frozenset[str]) -> SliceGraph:
        names = [str(self.taken(n, self.slicing.states[n])) for n in wanted]
        names += [self._spread(n) for n in wanted if n in spread]
        names += [owed_to(n, self.k) for n in self.owes]
        outputs = tuple(Output(n, n, self.types[n]) for n in names)
        name = f"{self.whole.name}/slice {self.k}"
        return SliceGraph(
            Graph(name, tuple(self.inputs.values()), tuple(self.operators), outputs),
            self.origins,
            self.cuts,
            self.sources,
        )

    # -- what operators take ---------------------------------------------------------------------

    def taken(self, operand: Operand, state: TokenState | None) -> Operand:
        """An operand as an operator of the slice takes it."""
        if isinstance(operand, Literal):
            return operand
        there = self.slicing.states[operand]
        state = state or there
        if there.is_whole or operand in self.slicing.inputs:
            whole = self._shared(operand)
            return self._cut(whole, operand, state) if not state.is_whole else whole
        if there.terms or there.is_pair:
            return self._rows(operand, self.k)
        if there.rows == state.rows:
            # A row that was repeated for all keys is the same for those up to here.
            return self._cut(self._rows(operand, self.k), operand, replace(state, rows=None))
        return self._cut(self._up_to_here(operand, there), operand, replace(state, keys=None))

    def _shared(self, name: str) -> str:
        """A value that all slices share, made here where it is not given."""
        if name in self.types:
            return name
        maker = self.whole.producers.get(name)
        if maker is None or name in self.given:
            return self._input(name, self.whole.types[name])
        for n in maker.reads:
            self._shared(n)
        self._append(maker)
        self.origins[maker.id] = maker.id
        return name

    def _rows(self, name: str, k: int) -> str:
        rows = rows_of(name, k)
        if rows in self.types:
            return rows
        self.sources[rows] = name, k
        return self._input(rows, self.slices.size(self.whole.types[name], self.slicing.states[name], k))

    def _cut(self, whole: str, name: str, state: TokenState) -> str:
        """A part of a value, along dims that slices have whole."""
        s, k = self.slices, self.k
        type = self.types[whole]
        if state.rows is None and state.keys is None:
            return whole
        starts = [s.start(k) if d == state.rows else 0 for d in range(type.rank)]
        result = s.size(type, state, k)
        limits = [a + n for a, n in zip(starts, result.shape, strict=True)]
        attrs = (("limit_indices", tuple(limits)), ("start_indices", tuple(starts)), ("strides", None))
        return self._further("slice", f"{whole}[{state.rows}, {state.keys} of {k}]", (whole,), result, name, attrs)

    def _up_to_here(self, name: str, there: TokenState) -> str:
        """The rows of all slices up to this one."""
        assert there.rows is not None
        parts = tuple(self._rows(name, j) for j in range(self.k + 1))
        if len(parts) == 1:
            return parts[0]
        type = self.slices.size(self.whole.types[name], TokenState(keys=there.rows), self.k)
        return self._further("concatenate", f"{name}[to {self.k}]", parts, type, name, (("dimension", there.rows),))

    def _spread(self, name: str) -> str:
        """The slice's rows between zeros for all earlier and later positions."""
        before, after = self.slices.start(self.k), self.slicing.tokens - self.slices.end(self.k)
        return self._between(name, spread_of(name, self.k), before, after, self.whole.types[name])

    def _padded(self, name: str, there: TokenState) -> str:
        """The slice's rows after zeros for all earlier ones."""
        rows = self._rows(name, self.k)
        if self.k == 0:
            return rows
        type = self.slices.size(self.whole.types[name], TokenState(keys=there.rows), self.k)
        before = self.slices.start(self.k)
        return self._between(name, f"{name}[after {before}]", before, 0, type)

    def _between(self, name: str, result: str, before: int, after: int, type: TensorType) -> str:
        """The slice's rows of a value between zeros for so many positions."""
        dim = self.slicing.states[name].rows
        config = tuple((before, after, 0) if d == dim else (0, 0, 0) for d in range(type.rank))
        zero = Literal("0.0" if type.dtype[0] in "fb" else "0", TensorType((), type.dtype))
        attrs = (("padding_config", config),)
        return self._further("pad", result, (self._rows(name, self.k), zero), type, name, attrs)

    # -- operators -------------------------------------------------------------------------------

    def add(self, op: Operator, how: OperatorSlice) -> None:
        """The slice of an operator."""
        operands = tuple(
            self._padded(o, self.slicing.states[o])
            if how.padded and isinstance(o, str)
            else self._spread(o)
            if how.spread and isinstance(o, str) and self.slicing.states[o].rows is not None
            else self.taken(o, state)
            for o, state in zip(op.operands, how.operands, strict=True)
        )
        types = [o.type if isinstance(o, Literal) else self.types[o] for o in operands]
        up_to_here = how.owed or how.tail
        results = []
        for v, state in zip(op.results, how.results, strict=True):
            size = TokenState(keys=state.rows) if up_to_here else state
            name = f"{v.name}[terms of {self.k}]" if up_to_here else rows_of(v.name, self.k)
            results.append(Value(name, self.slices.size(v.type, size, self.k)))
        id = results[0].name if len(results) == 1 else rows_of(op.id, self.k)
        attrs = resized(op, self.whole.operand_types(op), types, results[0].type)
        self._append(replace(op, id=id, operands=operands, results=tuple(results), attrs=attrs))
        self.origins[id] = op.id
        for v, value, state in zip(op.results, results, how.results, strict=True) if up_to_here else ():
            self._part(v.name, value.name, state, how.owed)

    def _part(self, name: str, total: str, state: TokenState, owed: bool) -> None:
        """The slice's own rows of what was made for all positions up to its last one."""
        k, s, whole = self.k, self.slices, self.whole.types[name]
        if owed and k + 1 < s.count:
            owed_here = self._input(owed_to(name, k + 1), self.types[total])
            self.sources[owed_here] = name, k + 1
            total = self._further("add", f"{name}[total of {k}]", (total, owed_here), self.types[total], name)
        shape = self.types[total].shape
        for is_here in (True, False):
            start, end = (s.start(k), s.end(k)) if is_here else (0, s.start(k))
            if start == end or (not is_here and not owed):
                continue
            starts = tuple(start if d == state.rows else 0 for d in range(whole.rank))
            limits = tuple(end if d == state.rows else n for d, n in enumerate(shape))
            attrs = (("limit_indices", limits), ("start_indices", starts), ("strides", None))
            type = replace(whole, shape=tuple(b - a for a, b in zip(starts, limits, strict=True)))
            self._further("slice", rows_of(name, k) if is_here else owed_to(name, k), (total,), type, name, attrs)
            self.owes += [] if is_here else [name]

    def _input(self, name: str, type: TensorType) -> str:
        if name not in self.types:
            self.inputs[name] = Input(name, type, self.roles.get(name, "other"))
            self.types[name] = type
        return name

    def _append(self, op: Operator) -> None:
        self.operators.append(op)
        self.types.update((v.name, v.type) for v in op.results)

    def _further(
        self,
        primitive: str,
        name: str,
        operands: tuple[Operand, ...],
        type: TensorType,
        like: str,
        attrs: tuple[tuple[str, Attr], ...] = (),
    ) -> str:
        """An operator that the whole graph does not have; its name stack is that of the value that it is made of."""
        if name not in self.types:
            maker = self.whole.producers.get(like)
            scope, marks = ("", ()) if maker is None else (maker.scope, maker.marks)
            self._append(Operator(name, primitive, operands, (Value(name, type),), attrs, scope=scope, marks=marks))
            self.cuts[name] = like
        return name


def resized(
    op: Operator, whole: Sequence[TensorType], types: Sequence[TensorType], result: TensorType
) -> tuple[tuple[str, Attr], ...]:
    """Parameters of an operator for other sizes of its dims.

    Args:
        op: an operator of the whole graph.
        whole: types of its operands there.
        types: types of its operands in the slice.
        result: type of its first result in the slice.
    """
    new: dict[str, Attr] = {}
    if op.primitive == "broadcast_in_dim":
        new["shape"] = result.shape
    elif op.primitive == "reshape":
        new["new_sizes"] = result.shape
    elif op.primitive == "slice":
        limits = zip(op.ints("limit_indices"), whole[0].shape, types[0].shape, strict=True)
        new["limit_indices"] = tuple(now if limit == n else limit for limit, n, now in limits)
    elif op.primitive in ("gather", "dynamic_slice"):
        sizes = zip(op.ints("slice_sizes"), whole[0].shape, types[0].shape, strict=True)
        new["slice_sizes"] = tuple(now if size == n else size for size, n, now in sizes)
    return tuple((key, new.get(key, value)) for key, value in op.attrs)
