"""Borders of arrays that are made of the array itself: circular, reflected and symmetric padding, and rolls.

`jax.numpy.pad` in such a mode is slices, reversals and concatenations, and a convolution of what they make. The array
with borders has a size that devices seldom divide (66 rows around 64), and no split of it goes through a concatenation.
As one operator the convolution has the borders as parameter ``borders``: all its dims are those of the images, and
only devices at the ends make them, or those next to each other around the circle. Gradients that go back through
borders are folded into the convolution that made them. `jax.numpy.roll` is the operator ``roll``.
`fold_borders` is called with the operators of a graph that is complete. Values stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from numpy.typing import NDArray

from autopar._compat.jaxprs import plain_params
from autopar.frontend.attrs import attrs_of
from autopar.frontend.folded_padding import Folding
from autopar.ir import Operand, Operator, TensorType, Value

#: Positions along a dim of an array, and those of the source that are added up there, in pairs.
_Map: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
_Params: TypeAlias = Mapping[str, Any]
_CONVOLUTION = "conv_general_dilated"
_MODES = ("wrap", "reflect", "symmetric")
_ADDITIONS = ("add", "add_any")
#: Operators that a map may consist of, at most, and elements of a dim.
_MOST_DEPTH, _MOST_SIZE = 16, 1 << 16


def ends_of(array: Any, dim: int, border: tuple[Any, ...]) -> tuple[Any, Any]:
    """The elements that lie before the first element of an array, and after its last one.

    Args:
        array: the array, or the shard that has the end in question.
        dim: with borders.
        border: (mode, side, elements before, elements after).
    """
    mode, _, low, high = border
    size = array.shape[dim]
    if mode == "wrap":
        return lax.slice_in_dim(array, size - low, size, axis=dim), lax.slice_in_dim(array, 0, high, axis=dim)
    skipped = 1 if mode == "reflect" else 0
    before = lax.slice_in_dim(array, skipped, skipped + low, axis=dim)
    after = lax.slice_in_dim(array, size - skipped - high, size - skipped, axis=dim)
    return lax.rev(before, (dim,)), lax.rev(after, (dim,))


def with_borders(array: Any, dim: int, border: tuple[Any, ...], step: int) -> tuple[Any, tuple[int, int]]:
    """A whole array with its borders, and the padding that is left: positions between elements are no elements.

    Args:
        array: the array.
        dim: with borders.
        border: (mode, side, positions before, positions after).
        step: positions from one element to the next.
    """
    mode, side, low, high = border
    before, after = ends_of(array, dim, (mode, side, low // step, high // step))
    return lax.concatenate([before, array, after], dim), (low % step, high % step)


def gone_back(result: Any, dim: int, border: tuple[Any, ...], ends: tuple[Any, Any]) -> Any:
    """A result without its borders, which are added to the elements that such borders are made of.

    Args:
        result: of a convolution, with the borders.
        dim: with borders.
        border: (mode, side, positions before, positions after).
        ends: whether the first, and the last element of the dim are in the result: other borders are nothing.
    """
    mode, _, low, high = border
    size = result.shape[dim] - low - high
    inner = lax.slice_in_dim(result, low, low + size, axis=dim)
    skipped = 1 if mode == "reflect" else 0
    before = lax.rev(lax.slice_in_dim(result, 0, low, axis=dim), (dim,))
    after = lax.rev(lax.slice_in_dim(result, low + size, None, axis=dim), (dim,))
    for part, at, there in ((before, skipped, ends[0]), (after, size - skipped - high, ends[1])):
        if part.shape[dim]:
            old = lax.slice_in_dim(inner, at, at + part.shape[dim], axis=dim)
            added = lax.add(old, jnp.where(there, part, jnp.zeros_like(part)))
            inner = lax.dynamic_update_slice_in_dim(inner, added, at, dim)
    return inner


def _convolved(lhs: Any, rhs: Any, *, borders: tuple[Any, ...], **params: Any) -> Any:
    """A whole convolution with borders."""
    numbers, padding = params["dimension_numbers"], list(params["padding"])
    for n, border in enumerate(borders):
        if border is not None and border[1] == "in":
            lhs, padding[n] = with_borders(lhs, numbers.lhs_spec[2 + n], border, params["lhs_dilation"][n])
        elif border is not None:
            padding[n] = padding[n][0] + border[2], padding[n][1] + border[3]
    apply: Any = lax.conv_general_dilated_p.bind
    result = apply(lhs, rhs, **{**params, "padding": tuple(padding)})
    for n, border in enumerate(borders):
        if border is not None and border[1] == "out":
            result = gone_back(result, numbers.out_spec[2 + n], border, (True, True))
    return result


def _rolled(array: Any, *, dim: int, shift: int) -> Any:
    """A whole array, rolled."""
    return jnp.roll(array, shift, dim)


def _primitive(name: str, whole: Callable[..., Any]) -> Primitive:
    """A primitive that a function of whole arrays computes; programs of several devices have a localizer."""
    primitive = Primitive(name)

    def shaped(*operands: Any, **params: Any) -> Any:
        result = jax.eval_shape(lambda *o: whole(*o, **params), *operands)
        return operands[0].update(shape=result.shape, dtype=result.dtype)

    def batched(operands: Any, dims: Any, **params: Any) -> tuple[Any, int]:
        return jax.vmap(lambda *o: whole(*o, **params), dims)(*operands), 0

    primitive.def_impl(whole)
    primitive.def_abstract_eval(shaped)
    mlir.register_lowering(primitive, mlir.lower_fun(whole, multiple_results=False))
    batching.primitive_batchers[primitive] = batched
    return primitive


#: A convolution with ``borders``: by window dim None, or (mode, "in" or "out", positions before and after). "in": the
#: array has them in place of zeros. "out": of the result with them, which is not returned, they go back to where the
#: borders of such an array come from.
bordered_p = _primitive(_CONVOLUTION, _convolved)
roll_p = _primitive("roll", _rolled)


def fold_borders(
    operators: Sequence[Operator],
    returned: Sequence[Operand],
    types: Mapping[str, TensorType],
    params_of: Callable[[str], _Params],
    fixed: Callable[[Operand], Any],
) -> tuple[Sequence[Operator], Sequence[Operand], Mapping[str, tuple[Primitive, _Params]]]:
    """Operators and returned values with folded borders, and primitives and parameters of changed operators by id.

    ``types`` are of all values and inputs; other arguments are those of `autopar.frontend.folded_padding.fold_padding`.
    Operators that nothing reads any more are still there.
    """
    primitives = {op.primitive for op in operators}
    if not primitives & {"concatenate", "pad"} or not primitives & {_CONVOLUTION, "slice", "split"}:
        return operators, returned, {}
    folding = _BorderWalk(operators, returned, types, params_of, fixed)
    for n in range(len(operators)):
        folding.visit(n)
    return folding.operators, folding.renamed(returned), folding.changed


class _BorderWalk(Folding):
    """One walk over the operators of a graph."""

    def __init__(
        self,
        operators: Sequence[Operator],
        returned: Sequence[Operand],
        types: Mapping[str, TensorType],
        params_of: Callable[[str], _Params],
        fixed: Callable[[Operand], Any],
    ) -> None:
        super().__init__(operators, params_of, fixed)
        self.changed: dict[str, tuple[Primitive, _Params]] = {}
        self.types = dict(types)
        self.readers: dict[str, list[int]] = {}
        for n, op in enumerate(operators):
            for name in op.reads:
                self.readers.setdefault(name, []).append(n)
        self.kept = Counter(o for o in returned if isinstance(o, str))
        self.producers = {v.name: (n, k) for n, op in enumerate(operators) for k, v in enumerate(op.results)}

    def visit(self, n: int) -> None:
        """Folds the borders of a convolution's operand into it, or makes a sum part of what it sums, or a roll."""
        op = self.taken_up(n)
        if op.primitive == _CONVOLUTION:
            self._borders(n)
        elif op.primitive == "concatenate":
            self._roll(n, op.integer("dimension"))
        elif op.primitive in _ADDITIONS and any(self._is(o, ("pad",)) for o in op.operands):
            self._sum(n)

    def _is(self, operand: Operand, primitives: Sequence[str]) -> bool:
        at = self.producers.get(operand) if isinstance(operand, str) else None
        return at is not None and self.operators[at[0]].primitive in primitives

    def _borders(self, n: int) -> None:
        """Borders of the first operand of a convolution, dim by dim, the last that were made first."""
        again = True
        while again:
            op, params = self.operators[n], self._params(n)
            source = op.operands[0]
            again = self._is(source, ("concatenate",)) and self._border(n, params, str(source))

    def _border(self, n: int, params: _Params, operand: str) -> bool:
        dim = self.operators[self.producers[operand][0]].integer("dimension")
        spatial = tuple(params["dimension_numbers"].lhs_spec[2:])
        if dim not in spatial:
            return False
        at = spatial.index(dim)
        borders = _borders_of(params)
        first, last = (int(p) for p in params["padding"][at])
        if max(first, last) > 0 or params["lhs_dilation"][at] != 1 or borders[at] is not None:
            return False
        for source in reversed(self._main_parts(operand, dim)):
            along = self._mode(operand, dim, source)
            if along is not None and along[1] + first >= 0 and along[2] + last >= 0:
                mode, low, high = along[0], along[1] + first, along[2] + last
                self._change(n, params, at, (low, high), (mode, "in", low, high), source)
                return True
        return False

    def _main_parts(self, name: str, dim: int) -> list[str]:
        """Largest parts of the concatenations along a dim that made an array, the nearest first."""
        parts: list[str] = []
        while self._is(name, ("concatenate",)):
            op = self.operators[self.producers[name][0]]
            if op.integer("dimension") != dim or len(parts) == _MOST_DEPTH:
                break
            name = max((str(o) for o in op.reads), key=lambda o: self._size(o, dim))
            parts.append(name)
        return parts

    def _size(self, name: str, dim: int) -> int:
        return self.types[name].shape[dim]

    def _mode(self, name: str, dim: int, source: str) -> tuple[str, int, int] | None:
        """The borders that an array is of a source: mode, positions before and after."""
        size, count = self._size(source, dim), self._size(name, dim)
        along = self._map(name, dim, source, size)
        if along is None or len(along[0]) != count or not 0 < count - size <= size:
            return None
        at = np.argsort(along[0], kind="stable")
        if not np.array_equal(along[0][at], np.arange(count)):
            return None
        return _named(along[1][at], size)

    def _roll(self, n: int, dim: int) -> None:
        """A concatenation of the end and of the beginning of an array."""
        op = self.operators[n]
        makers = [self.producers.get(o) if isinstance(o, str) else None for o in op.operands]
        if len(makers) != 2 or any(at is None or self.operators[at[0]].primitive != "slice" for at in makers):
            return
        sources = {self.operators[at[0]].operands[0] for at in makers if at is not None}
        size = op.results[0].type.shape[dim]
        if len(sources) == 1 and isinstance(source := sources.pop(), str):
            self._as_roll(n, dim, source, self._map(op.results[0].name, dim, source, size))

    def _as_roll(self, n: int, dim: int, source: str, along: _Map | None) -> None:
        op = self.operators[n]
        size = op.results[0].type.shape[dim]
        if along is None or len(along[0]) != size or len(set(along[0].tolist())) != size:
            return
        shifts = (along[0] - along[1]) % size
        shift = int(shifts[0])
        if len(set(shifts.tolist())) == 1 and shift:
            params = {"dim": dim, "shift": shift if shift <= size // 2 else shift - size}
            self.operators[n] = replace(op, primitive="roll", operands=(source,), attrs=attrs_of(params))
            self.changed[op.id] = roll_p, params

    def _sum(self, n: int) -> None:
        """A sum of parts of one array: its borders go back to where they come from, or it is rolled."""
        op = self.operators[n]
        dim = self._dim_of(op)
        if dim is None:
            return
        for source in self._origins(op.results[0].name):
            if self.types[source].rank != op.results[0].type.rank:
                continue
            taken, count = self._size(source, dim), op.results[0].type.shape[dim]
            along = self._map(op.results[0].name, dim, source, taken)
            if along is None or len(along[0]) != taken:
                continue
            if taken == count:
                self._as_roll(n, dim, source, along)
                return
            if self._is(source, (_CONVOLUTION,)) and count < taken <= 2 * count and self._only(source, n):
                self._back(n, dim, source, along, count)
                return

    def _back(self, n: int, dim: int, source: str, along: _Map, count: int) -> None:
        op, at = self.operators[n], self.producers[source][0]
        order = np.argsort(along[1], kind="stable")
        named = _named(along[0][order], count) if np.array_equal(along[1][order], np.arange(len(order))) else None
        params = self._params(at)
        spatial = tuple(params["dimension_numbers"].out_spec[2:])
        if named is None or dim not in spatial:
            return
        k = spatial.index(dim)
        mode, low, high = named
        before = _borders_of(params)[k]  # of a sum that was folded: each end has one of its own
        if params["window_strides"][k] != 1 or (before is not None and not _joins(before, named)):
            return
        first, last = params["padding"][k]
        padding = int(first) - low, int(last) - high
        side = "in" if mode == "wrap" else "out"  # what a window has beyond an end is what comes from the other one
        if mode == "wrap" and (min(padding) < 0 or not self._goes_around(at, params, k, count)):
            return
        amounts = padding if mode == "wrap" else (low, high)
        if before is not None:
            amounts = before[2] + low, before[3] + high
        result = Value(source, op.results[0].type)
        self.operators[at] = replace(self.operators[at], results=(result,))
        self.types[source] = result.type
        self._change(at, params, k, padding, (mode, side, *amounts), None)
        self.names[op.results[0].name] = source
        self.readers[source] = self.readers.get(op.results[0].name, [])
        self.kept[source] = self.kept[op.results[0].name]

    def _goes_around(self, at: int, params: _Params, k: int, count: int) -> bool:
        """Whether all that a convolution makes of its operand is in its result, of which ``count`` positions remain."""
        op = self.operators[at]
        numbers = params["dimension_numbers"]
        size = self._size(str(op.operands[0]), numbers.lhs_spec[2 + k])
        extent = (self._size(str(op.operands[1]), numbers.rhs_spec[2 + k]) - 1) * params["rhs_dilation"][k]
        step, first = params["lhs_dilation"][k], int(params["padding"][k][0])
        last = (size - 1) * step + first
        whole = op.results[0].type.shape[numbers.out_spec[2 + k]]
        return bool(size * step == count and extent <= first and last < whole)

    def _dim_of(self, op: Operator) -> int | None:
        """The dim along which an operand of a sum is padded."""
        for operand in op.operands:
            if isinstance(operand, str) and self._is(operand, ("pad",)):
                config: Any = self.operators[self.producers[operand][0]].attr("padding_config")
                dims = [d for d, amounts in enumerate(config) if tuple(amounts) != (0, 0, 0)]
                return dims[0] if len(dims) == 1 else None
        return None

    def _origins(self, name: str) -> list[str]:
        """Candidates for the array that a sum is made of: where its first operands lead, the nearest first."""
        origins: list[str] = []
        while len(origins) < _MOST_DEPTH and self._is(name, (*_ADDITIONS, "pad", "slice", "split", "rev")):
            first = self.operators[self.producers[name][0]].operands[0]
            if not isinstance(first, str):
                break
            origins.append(name := first)
        return origins

    def _only(self, source: str, n: int) -> bool:
        """Whether nothing but the sum reads a source, or what the sum is made of."""
        inside, new = {n}, [n]
        while new:
            for name in self.operators[new.pop()].reads:
                at = self.producers.get(name)
                if name != source and at is not None and at[0] not in inside:
                    inside.add(at[0])
                    new.append(at[0])
        names = {v.name for i in inside - {n} for v in self.operators[i].results} | {source}
        return all(not self.kept[name] and inside.issuperset(self.readers.get(name, ())) for name in names)

    def _map(self, name: str, dim: int, source: str, size: int, depth: int = 0) -> _Map | None:
        """Elements of a source that an array consists of along a dim; None where it is anything else."""
        if name == source:
            return np.arange(size), np.arange(size)
        at = self.producers.get(name)
        if at is None or depth > _MOST_DEPTH or size > _MOST_SIZE:
            return None
        op, number = self.operators[at[0]], at[1]
        shape = op.results[number].type.shape
        if op.primitive in ("concatenate", *_ADDITIONS):
            return self._joined(op, dim, source, size, depth)
        if op.primitive not in ("slice", "split", "rev", "pad") or not isinstance(op.operands[0], str):
            return None
        inner = self._map(op.operands[0], dim, source, size, depth + 1)
        step = None if inner is None else self._step(op, number, dim, shape[dim])
        if inner is None or step is None:
            return None
        scale, offset = step
        positions = inner[0] * scale + offset
        inside = (positions >= 0) & (positions < shape[dim])
        return positions[inside], inner[1][inside]

    def _joined(self, op: Operator, dim: int, source: str, size: int, depth: int) -> _Map | None:
        joins = op.primitive == "concatenate"
        if joins and op.integer("dimension") != dim:
            return None
        parts: list[_Map] = []
        offset = 0
        for operand in op.operands:
            part = self._map(operand, dim, source, size, depth + 1) if isinstance(operand, str) else None
            if part is None:
                return None
            parts.append((part[0] + offset, part[1]))
            offset += self._size(str(operand), dim) if joins else 0
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _step(self, op: Operator, number: int, dim: int, count: int) -> tuple[int, int] | None:
        """(scale, offset) of positions of an operand in the result; None where it changes more than a dim."""
        if op.primitive == "rev":
            return (-1, count - 1) if op.ints("dimensions") == (dim,) else None
        if op.primitive == "split":
            return (1, -sum(op.ints("sizes")[:number])) if op.integer("axis") == dim else None
        if op.primitive == "pad":
            config: Any = op.attr("padding_config")
            value = self.fixed(op.operands[1])
            others = any(tuple(c) != (0, 0, 0) for d, c in enumerate(config) if d != dim)
            return None if others or config[dim][2] or value is None or value != 0 else (1, int(config[dim][0]))
        given, result = self.types[str(op.operands[0])].shape, op.results[0].type.shape
        starts = op.ints("start_indices")
        strides = (1,) * len(given) if op.attr("strides") is None else op.ints("strides")
        others = given[:dim] + given[dim + 1 :] != result[:dim] + result[dim + 1 :]
        return None if others or set(strides) != {1} else (1, -starts[dim])

    def _params(self, n: int) -> _Params:
        op = self.operators[n]
        return self.changed[op.id][1] if op.id in self.changed else self.params_of(op.id)

    def _change(
        self, n: int, params: _Params, k: int, padding: tuple[int, int], border: tuple[Any, ...], source: str | None
    ) -> None:
        paddings, borders = list(params["padding"]), list(_borders_of(params))
        paddings[k], borders[k] = (int(padding[0]), int(padding[1])), border
        changed = {**params, "padding": tuple(paddings), "borders": tuple(borders)}
        op = self.operators[n]
        operands = op.operands if source is None else (source, *op.operands[1:])
        self.operators[n] = replace(op, operands=operands, attrs=attrs_of(plain_params(_CONVOLUTION, changed)))
        self.changed[op.id] = bordered_p, changed


def _borders_of(params: _Params) -> tuple[tuple[Any, ...] | None, ...]:
    borders: tuple[tuple[Any, ...] | None, ...] = params.get("borders") or (None,) * len(params["padding"])
    return borders


def _joins(before: tuple[Any, ...], named: tuple[str, int, int]) -> bool:
    """Whether borders of one end that go back, and others, are those of both ends."""
    mode, low, high = named
    ends = (before[2] == 0 and high == 0) or (before[3] == 0 and low == 0)
    return before[:2] == (mode, "out") and mode != "wrap" and ends


def _named(taken: NDArray[np.int64], size: int) -> tuple[str, int, int] | None:
    """The mode, and positions before and after, of borders of ``size`` elements that lie at positions ``taken``."""
    more = len(taken) - size
    for low in range(more + 1):
        if not np.array_equal(taken[low : low + size], np.arange(size)):
            continue
        for mode in _MODES:
            if max(low, more - low) < size and np.array_equal(
                taken,
                np.pad(np.arange(size), (low, more - low), mode=mode),  # type: ignore[call-overload]
            ):
                return mode, low, more - low
    return None
