"""A step whose inside works on padded dims: what it takes and returns has the sizes that the user gave.

Inputs are padded with zeros and results cut. Operators work on the padding as on the rest; where one adds up or takes
the largest along a padded dim, or windows slide over it, the padding is filled with what does not count there. Windows
over padding alone make padding. An operator that takes such a dim in another way gets it without its padding. Of a
stage of a pipeline the loop over microbatches runs on padded dims: state enters it with padding, what comes with a
microbatch gets its own inside, and what other stages are sent has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.primitives import bind
from autopar.frontend import BoundGraph, Traced
from autopar.frontend.bordered import roll_p
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import FORWARD, is_stage_loop
from autopar.ir.primitives import ELEMENTWISE
from autopar.lower.localize.base import scalar
from autopar.lower.retrace import Recorder, retraced
from autopar.sharding.halo import Halo
from autopar.sharding.padding import PaddedDim, Padding, Place, enters_whole, inside, labelled, named, splits_by_loops

Shape: TypeAlias = tuple[int, ...]
Params: TypeAlias = dict[str, Any]

#: By primitive the operands whose padding is filled, and the loops along which it does not count.
_FILLED: Mapping[str, tuple[Sequence[int], str]] = MappingProxyType(
    {
        "conv_general_dilated": ((0, 1), "sum"),
        "dot_general": ((0, 1), "sum"),
        "reduce_and": ((0,), "and"),
        "reduce_max": ((0,), "max"),
        "reduce_min": ((0,), "min"),
        "reduce_or": ((0,), "or"),
        "reduce_sum": ((0,), "sum"),
        "pad": ((0,), "sum"),
        "reduce_window_max": ((0,), "max"),
        "reduce_window_min": ((0,), "min"),
        "reduce_window_sum": ((0,), "sum"),
        "scatter-add": ((2,), "sum"),
        "scatter-sub": ((2,), "sum"),
    }
)
#: Whose results have the padding of their operand, whatever it is; a zero stays one.
_MOVES = ("broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose")
#: Whose windows slide over padding as over the rest.
_WINDOWED = (
    "conv_general_dilated", "pad", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "roll",
    "select_and_scatter_add",
)  # fmt: skip
#: Whose parameters hold whatever the sizes are of the dims that are loops.
_SIZELESS = ELEMENTWISE | {
    "argmax", "argmin", "concatenate", "copy", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dot_general",
    "optimization_barrier", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "rev",
    "scatter-add", "scatter-sub", "sort", "squeeze", "stop_gradient", "top_k", "transpose",
}  # fmt: skip


def padded(traced: Traced, dims: Sequence[PaddedDim]) -> Traced:
    """``traced`` with ``dims`` and all that are split with them padded inside.

    Args:
        traced: a step.
        dims: dims by name of a value and number, with the padded size of each.
    """
    if not dims:
        return traced
    return retraced(traced, lambda env, recorder: run_padded(traced.program, dims, env, recorder))


def run_padded(
    bound: BoundGraph, dims: Sequence[PaddedDim], env: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any]:
    """Every value that the outputs of a graph name, computed on padded dims.

    Args:
        bound: a step, or a stage of a pipeline.
        dims: dims by name of a value and number, with the padded size of each.
        env: values of its inputs.
        recorder: gives operators that are traced again the scopes of the old ones.
    """
    return _Run(bound, named(bound.graph, dims), recorder).results(env)


@dataclass(frozen=True)
class _Padded:
    """An array with padding.

    Args:
        array: the array.
        shape: without the padding.
        zero: whether the padding is known to be 0.
    """

    array: Any
    shape: Shape
    zero: bool = False

    def cut(self) -> Any:
        """The array without its padding."""
        return (
            self.array if self.array.shape == self.shape else lax.slice(self.array, (0,) * len(self.shape), self.shape)
        )

    def filled(self, dim: int, reduce: str) -> Any:
        """The array with what does not count in a reduction in the padding of a dim."""
        array = self.array
        if array.shape[dim] == self.shape[dim] or (self.zero and reduce == "sum"):
            return array
        counted = lax.lt(lax.broadcasted_iota(np.int32, array.shape, dim), np.int32(self.shape[dim]))
        return lax.select(counted, array, lax.full_like(array, _neutral(reduce, array.dtype)))


def _neutral(reduce: str, dtype: Any) -> Any:
    """The element that leaves a reduction unchanged."""
    if reduce in ("and", "or"):
        return reduce == "and"
    if reduce == "sum" or dtype == np.bool_:
        return reduce == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf if reduce == "max" else np.inf, dtype)
    integers: Any = jnp.iinfo
    info = integers(dtype)
    return info.min if reduce == "max" else info.max


@dataclass(frozen=True)
class _Run:
    """A run of a graph on padded values.

    Args:
        bound: the graph.
        padding: of its values; see `autopar.sharding.padding.types_of`.
        recorder: of the trace.
        prefix: of names of its values in ``padding``.
    """

    bound: BoundGraph
    padding: Padding
    recorder: Recorder
    prefix: str = ""

    @property
    def graph(self) -> Graph:
        return self.bound.graph

    def results(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Results of the graph, by name."""
        loop = next(filter(is_stage_loop, self.graph.operators), None)
        env: dict[str, _Padded] = {
            name: _Padded(array, tuple(array.shape)) if loop else self._pad(name, array)
            for name, array in inputs.items()
        }
        for op in self.graph.operators:
            # What reads state after the loop pads it again: in between none is kept.
            results = self._loop(op, dict(env)) if op is loop else self._operator(op, env)
            env.update(zip((v.name for v in op.results), results, strict=True))
        return {o.operand: env[o.operand].cut() for o in self.graph.outputs if isinstance(o.operand, str)}

    def _loop(self, op: Operator, given: dict[str, _Padded]) -> list[_Padded]:
        """Results of the loop over the microbatches of a stage."""
        scan = Scan.of(op)
        inner = replace(self, bound=self.bound.bounds[op.id].regions["body"], prefix=inside(op))
        names, carried, slices = scan.split([i.name for i in scan.body.inputs])
        with self.recorder.made_for(op.scope, FORWARD):
            consts, initial, rows = scan.split([self._read(o, given) for o in op.operands])
            whole = [
                o if enters_whole(self.graph, operand) else _Padded(o.cut(), o.shape)
                for o, operand in zip(consts, op.operands, strict=False)
            ]
            starts = [inner._as(name, o).array for name, o in zip(carried, initial, strict=True)]
            xs = [o.cut() for o in rows]
        ends = [o.operand for o in scan.body.outputs]

        def trip(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(zip(names, whole, strict=True))
            env.update((n, _Padded(a, o.shape)) for n, a, o in zip(carried, carry, initial, strict=True))
            env.update((n, _Padded(a, tuple(a.shape))) for n, a in zip(slices, row, strict=True))
            for o in inner.graph.operators:
                env.update(zip((v.name for v in o.results), inner._operator(o, env), strict=True))
            after, rows_made = scan.split_results([inner._read(x, env) for x in ends])
            kept = [inner._as(name, o) for name, o in zip(carried, after, strict=True)]
            return [jnp.asarray(o.array) for o in kept], [jnp.asarray(o.cut()) for o in rows_made]

        with self.recorder.around(op):
            carry, stacks = lax.scan(trip, starts, xs, length=scan.length, reverse=bool(op.attr("reverse")))
        results = [_Padded(a, v.type.shape) for a, v in zip(carry, op.results, strict=False)]
        return [*results, *(_Padded(a, tuple(a.shape)) for a in stacks)]

    def _as(self, name: str, value: _Padded) -> _Padded:
        """A value with the padding of the value ``name``."""
        shape = self._shape(name, value.shape)
        return value if value.array.shape == shape else self._pad(name, value.cut())

    def _read(self, operand: Operand, env: dict[str, _Padded]) -> _Padded:
        """An operand with its padding, which the first reader makes."""
        if isinstance(operand, Literal):
            return _Padded(scalar(operand), (), operand.is_zero)
        env[operand] = self._as(operand, env[operand])
        return env[operand]

    def _pad(self, name: str, array: Any) -> _Padded:
        """An array without padding as the value ``name`` with its."""
        shape = self.padding.shapes.get(self.prefix + name)
        if shape is None or shape == array.shape:
            return _Padded(array, tuple(array.shape))
        config = [(0, n - m, 0) for n, m in zip(shape, array.shape, strict=True)]
        return _Padded(lax.pad(array, jnp.zeros((), array.dtype), config), tuple(array.shape), True)

    def _operator(self, op: Operator, env: dict[str, _Padded]) -> list[_Padded]:
        with self.recorder.around(op):
            return self._results(op, [self._read(o, env) for o in op.operands])

    def _results(self, op: Operator, operands: list[_Padded]) -> list[_Padded]:
        program = self.bound
        if op.primitive == "constant" and op.id in program.constants:
            return [self._pad(op.results[0].name, jnp.asarray(program.constants[op.id]))]
        bound = program.bounds[op.id]
        has_padding = any(self.prefix + o in self.padding.shapes for o in (*op.reads, *(v.name for v in op.results)))
        types = [v.type.shape for v in op.results]
        if has_padding:
            params = dict(bound.params)
            arrays = self._arrays(op, operands, params)
            if arrays is not None:
                outputs = bind(bound.primitive, params, arrays)
                zero = op.primitive in _MOVES and operands[0].zero and not self._spreads(op)
                return [_Padded(a, t, zero) for a, t in zip(outputs, types, strict=True)]
        outputs = bind(bound.primitive, bound.params, [o.cut() for o in operands])
        return [self._pad(v.name, a) for v, a in zip(op.results, outputs, strict=True)]

    def _pads(self, place: Place) -> bool:
        """Whether a dim is of a part that is padded."""
        return (self.prefix + place[0], place[1]) in self.padding.places

    def _shape(self, name: str, plain: Shape) -> Shape:
        return self.padding.shapes.get(self.prefix + name, plain)

    def _spreads(self, op: Operator) -> bool:
        """Whether an operator puts elements of a value into the padding of a dim that the value does not have."""
        if op.primitive != "broadcast_in_dim" or not op.reads:
            return False
        counts = [
            sum(n != m for n, m in zip(self.graph.types[name].shape, self._shape(name, ()), strict=False))
            for name in (op.reads[0], op.results[0].name)
        ]
        return counts[0] != counts[1]

    def _arrays(self, op: Operator, operands: list[_Padded], params: Params) -> list[Any] | None:
        """Operands with which an operator gives padded results, with ``params`` changed; None where one must be cut
        first.
        """
        rule = splits_by_loops(op, self.graph.operand_types(op))
        if rule is None or (op.primitive not in _SIZELESS and op.primitive not in _ADAPTED):
            return None
        windowed = op.primitive in _WINDOWED
        loops = {place: loop for loop, place in labelled(op, rule, windows=windowed)}
        if windowed and len({(n, self._pads(place)) for place, n in loops.items()}) != len(set(loops.values())):
            return None  # other parts of a loop are padded than not, or by themselves
        for name in (*op.reads, *(v.name for v in op.results)):
            full = self.graph.types[name].shape
            grown = zip(full, self._shape(name, full), strict=True)
            if any(n != m and (name, d) not in loops for d, (n, m) in enumerate(grown)):
                return None
        arrays = [o.array for o in operands]
        which, reduce = _FILLED.get(op.primitive, ((), ""))
        for i in which:
            for d, factor in enumerate(rule.operands[i]):
                loop = None if factor is None else rule.factors[factor]
                if loop is not None and (loop.reduce is not None or loop.halo is not None):
                    filled = _Padded(arrays[i], operands[i].shape, operands[i].zero)
                    arrays[i] = filled.filled(d, reduce)
        adapt = _ADAPTED.get(op.primitive)
        targets = [self._shape(v.name, v.type.shape) for v in op.results]
        return arrays if adapt is None else adapt(op, operands, arrays, params, targets[0])


_Adapt: TypeAlias = Callable[[Operator, list[_Padded], list[Any], Params, Shape], list[Any] | None]


def _sized(key: str) -> _Adapt:
    """A parameter that is the shape of the result."""

    def adapt(
        op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape
    ) -> list[Any] | None:
        params[key] = shape
        return arrays

    return adapt


def _reshape(
    op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape
) -> list[Any] | None:
    """Reshapes take padding along where it lies after the same elements before and after."""
    params["new_sizes"] = shape
    return arrays if np.prod(shape) == arrays[0].size else None


def _slice(op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape) -> list[Any] | None:
    """Dims that are taken whole are taken with their padding."""
    limits = zip(params["limit_indices"], operands[0].shape, arrays[0].shape, strict=True)
    params["limit_indices"] = tuple(m if m != n else limit for limit, n, m in limits)
    return arrays


#: (elements of a dim, number of windows over it, elements of a window).
_Windows: TypeAlias = tuple[int, int, int]


def _slid(
    params: Params, steps: Sequence[tuple[int, int, int]], plain: Sequence[_Windows], padded: Sequence[_Windows]
) -> bool:
    """Whether windows slide over dims with padding as over the rest, with the padding of ``params`` changed.

    They do not where they would leave out more of a dim than they do without.

    Args:
        params: of windows over all dims of ``steps``.
        steps: of each dim as `Halo.sliding` takes them.
        plain: of each dim without padding.
        padded: of each dim with padding.
    """
    padding = list(params["padding"])
    for d, (size, count, taps) in enumerate(padded):
        low, high = padding[d]
        if padded[d] != plain[d]:
            padding[d] = low, Halo.sliding(size, count, taps, steps[d], low).after
        if padding[d][1] < min(0, high):
            return False
    params["padding"] = tuple(padding)
    return True


def _conv(op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape) -> list[Any] | None:
    """Windows over dims with their padding; a padded dim of features or examples in groups must be cut."""
    numbers = params["dimension_numbers"]
    grouped = [(0, numbers.lhs_spec[1])] * (params["feature_group_count"] > 1)
    grouped += [(0, numbers.lhs_spec[0])] * (params["batch_group_count"] > 1)
    grouped += [(1, numbers.rhs_spec[0])] * (len(grouped) > 0)
    if any(arrays[n].shape[d] != operands[n].shape[d] for n, d in grouped):
        return None
    steps = list(zip(params["window_strides"], params["rhs_dilation"], params["lhs_dilation"], strict=True))

    def windows(x: Shape, kernel: Shape, y: Shape) -> list[_Windows]:
        dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        return [(x[i], y[k], kernel[j]) for i, j, k in dims]

    plain = windows(operands[0].shape, operands[1].shape, op.results[0].type.shape)
    return arrays if _slid(params, steps, plain, windows(arrays[0].shape, arrays[1].shape, shape)) else None


def _reduced(params: Params, plain: tuple[Shape, Shape], padded: tuple[Shape, Shape]) -> bool:
    """`_slid` of windows that are reduced; both have the shapes of elements and of windows."""
    taps = params["window_dimensions"]
    spread, base = (params.get(name) or (1,) * len(taps) for name in ("window_dilation", "base_dilation"))
    steps = list(zip(params["window_strides"], spread, base, strict=True))
    return _slid(params, steps, *(list(zip(*shapes, taps, strict=True)) for shapes in (plain, padded)))


def _reduce_window(
    op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape
) -> list[Any] | None:
    """Windows over dims with their padding."""
    plain = operands[0].shape, op.results[0].type.shape
    return arrays if _reduced(params, plain, (arrays[0].shape, shape)) else None


def _select_and_scatter_add(
    op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape
) -> list[Any] | None:
    """Gradients of windows with padding are 0, and no element of padding is the largest of a window."""
    source, values = operands
    for d in range(len(shape)):
        source = replace(source, array=source.filled(d, "sum"))
        values = replace(values, array=values.filled(d, "max" if params["select_prim"].name == "ge" else "min"))
    slides = _reduced(params, (values.shape, source.shape), (values.array.shape, source.array.shape))
    return [source.array, values.array] if slides else None


def _pad(op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape) -> list[Any] | None:
    """Zeros before, between and after the elements of a dim with padding, which is 0."""
    config = list(params["padding_config"])
    for d, (low, high, between) in enumerate(config):
        sizes = arrays[0].shape[d], shape[d]
        if (low, high, between) == (0, 0, 0) or sizes == (operands[0].shape[d], op.results[0].type.shape[d]):
            continue
        if not operands[1].zero:
            return None
        config[d] = low, Halo.padded(*sizes, config[d]).after, between
    params["padding_config"] = tuple(config)
    return arrays


def _roll(op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape) -> list[Any] | None:
    """A dim that is rolled with its padding, where copies of the elements lie that are to come to the other end."""
    (array,), dim, shift = arrays, params["dim"], params["shift"]
    size, padded = operands[0].shape[dim], shape[dim]
    if padded == size:
        return arrays
    first = padded - shift if shift > 0 else size  # of the places that the roll brings to the other end
    if first - min(shift, 0) > padded:
        return None  # the padding has fewer places
    beyond = padded - size if shift > 0 else size - padded
    copies = roll_p.bind(array, dim=dim, shift=beyond)
    taken = lax.ge(lax.broadcasted_iota(np.int32, array.shape, dim), np.int32(first))
    return [lax.select(taken, copies, array)]


def _gather(op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape) -> list[Any] | None:
    """Slices take dims with their padding; of a dim of which one element is picked none of the padding is."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    before, after = operands[0].shape, arrays[0].shape
    params["slice_sizes"] = tuple(m if k == n != 1 else k for k, n, m in zip(sizes, before, after, strict=True))
    clamped = params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    arrays[1] = _inside(arrays[1], numbers.start_index_map, clamped, before, after)
    return arrays


def _scatter(
    op: Operator, operands: list[_Padded], arrays: list[Any], params: Params, shape: Shape
) -> list[Any] | None:
    """Updates are written to no padding."""
    numbers = params["dimension_numbers"]
    dims = numbers.scatter_dims_to_operand_dims
    clamped = params["mode"] == lax.GatherScatterMode.CLIP
    arrays[1] = _inside(arrays[1], dims, clamped, operands[0].shape, arrays[0].shape)
    return arrays


def _inside(indices: Any, dims: Sequence[int], clamped: bool, before: Shape, after: Shape) -> Any:
    """Indices that mean with padding what they mean without: beyond the size they stay beyond, or are clamped.

    Of indices that are promised to be in bounds XLA clamps reads and drops writes, and so do the ones with padding.
    """
    if all(before[d] == after[d] for d in dims):
        return indices
    components = []
    info: Any = jnp.iinfo
    if max(after) > info(indices.dtype).max:
        indices = lax.convert_element_type(indices, np.int32)
    for i, d in enumerate(dims):
        one = lax.slice_in_dim(indices, i, i + 1, axis=indices.ndim - 1)
        if before[d] != after[d]:
            last = np.asarray(before[d] - 1, indices.dtype)
            one = lax.min(one, last) if clamped else lax.select(lax.gt(one, last), lax.full_like(one, after[d]), one)
        components.append(one)
    return lax.concatenate(components, indices.ndim - 1) if len(components) > 1 else components[0]


_ADAPTED: Mapping[str, _Adapt] = MappingProxyType(
    {
        "broadcast_in_dim": _sized("shape"),
        "conv_general_dilated": _conv,
        "gather": _gather,
        "iota": _sized("shape"),
        "pad": _pad,
        "reduce_window_max": _reduce_window,
        "reduce_window_min": _reduce_window,
        "reduce_window_sum": _reduce_window,
        "reshape": _reshape,
        "roll": _roll,
        "scatter-add": _scatter,
        "scatter-sub": _scatter,
        "select_and_scatter_add": _select_and_scatter_add,
        "slice": _slice,
    }
)
