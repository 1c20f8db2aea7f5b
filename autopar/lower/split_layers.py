"""A step whose stacked layers are taken apart: one `lax.scan` over layers becomes several, one after the other.

Models that scan over layers keep the parameters of all layers in one array, the layer's number first. A pipeline wants
the layers of a stage, with their parameters and optimizer state, on that stage. So the step is rewritten: each such
leaf becomes an input for each group of layers, each loop over layers a loop for each group, and everything that
treats layers uniformly (casts, gradients, the optimizer's update) runs group by group. This is splitting over an axis
of time once more (see `autopar.microbatch`): the rules say which operators treat the layers of a stack independently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.primitives import bind
from autopar.frontend import Bound, BoundGraph, Traced
from autopar.frontend.build import build_graph
from autopar.ir import Graph, Layout, Literal, Operator
from autopar.ir.loops import Scan
from autopar.ir.primitives import CASTS, is_generator, wire_of
from autopar.lower.batch_loops import parts_side_by_side
from autopar.lower.localize.base import LocalContext, scalar
from autopar.lower.localize.registry import localize
from autopar.lower.retrace import Recorder, Step, step_of
from autopar.microbatch import AXIS, pseudo_mesh
from autopar.microbatch.inside import zeros_of
from autopar.microbatch.match import Match, local_match, match

_STATE = ("parameter", "optimizer")


@dataclass(frozen=True, eq=False)
class SplitStep:
    """A step with stacks taken apart.

    Args:
        step: the rewritten step.
        groups: number of groups of layers; 1 where nothing was taken apart.
        inputs: for each input of the original step its inputs of the rewritten one, one or ``groups``.
        outputs: likewise for outputs.
    """

    step: Step
    groups: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    def names(self, index: int) -> tuple[str, ...]:
        """Names of the rewritten step's inputs that an input of the original step is in."""
        return tuple(self.step.graph.inputs[i].name for i in self.inputs[index])


def layer_count(graph: Graph) -> int:
    """Length of the loop over stacked layers that does the most; 0 where there is none.

    Such a loop takes slices of parameters, as they are, cast, or in a format of what is sent.
    """
    state = {i.name for i in graph.inputs if i.role == "parameter" and i.type.rank}
    best = (0, 0)
    for op in graph.operators:
        if op.primitive == "scan":
            scan = Scan.of(op)
            stacked = sum(_source(graph, o) in state for o in scan.split(op.operands)[2] if isinstance(o, str))
            best = max(best, (stacked, scan.length)) if stacked else best
    return best[1]


def group_count(layers: int, stages: int | None, most: int = 16, a_stage: int = 4) -> int:
    """Groups into which stacked layers are taken apart for a pipeline: about four a stage, of equal size.

    Where ``stages`` divides the layers it divides the groups too: 80 layers in 20 groups would not make eight equal
    stages.

    Args:
        layers: of the stack.
        stages: of the pipeline; None where their number is free.
        most: groups where it is free.
        a_stage: most groups of a stage where it is not.
    """
    fewest, most = (2, most) if stages is None else (stages, a_stage * stages)
    possible = [n for n in range(1, layers + 1) if layers % n == 0]
    enough = [n for n in possible if n >= fewest]
    fitting = [n for n in enough if n <= most] or enough[:1] or possible
    even = [n for n in fitting if stages is not None and n % stages == 0]
    return max(even or fitting, default=1)


def _source(graph: Graph, name: str) -> str:
    """The value that ``name`` is cast from, or that is sent as it in a format of its own."""
    while name in graph.producers and (graph.producers[name].primitive in CASTS or wire_of(graph.producers[name])):
        operand = graph.producers[name].operands[0]
        if not isinstance(operand, str):
            break
        name = operand
    return name


def split_layers(traced: Traced, groups: int) -> SplitStep:
    """The step with its stacks of layers in ``groups`` groups, and without loops over parts of the batch.

    Args:
        traced: a step; see `autopar.lower.batch_loops` for its loops over parts of the batch.
        groups: divides the number of layers; 1 leaves the step as it is.
    """
    traced = parts_side_by_side(traced)
    whole = step_of(traced)
    graph = traced.graph
    same = tuple((i,) for i in range(len(graph.inputs)))
    if groups == 1:
        return SplitStep(whole, 1, same, tuple((i,) for i in range(len(graph.outputs))))
    length = layer_count(graph)
    leaves = {i.name for i in graph.inputs if i.role in _STATE and i.type.rank and i.type.shape[0] == length}
    while True:
        split_values = _SplitValues(traced.program, groups, leaves)
        split = _retraced(whole, split_values, groups, leaves)
        lost = {
            o.updates
            for o, n in zip(graph.outputs, split_values.split_outputs, strict=True)
            if o.updates in leaves and not n
        }
        if not lost:
            return split
        leaves -= {name for name in lost if name is not None}


def _retraced(whole: Step, split_values: _SplitValues, groups: int, leaves: set[str]) -> SplitStep:
    graph = whole.graph
    avals: list[Any] = []
    names: list[tuple[str, str]] = []
    inputs: list[tuple[int, ...]] = []
    for i, aval in zip(graph.inputs, whole.avals, strict=True):
        start = len(avals)
        if i.name in leaves:
            shape = (aval.shape[0] // groups, *aval.shape[1:])
            avals += [jax.ShapeDtypeStruct(shape, aval.dtype)] * groups
            names += [(piece_name(i.name, g), i.role) for g in range(groups)]
        else:
            avals.append(aval)
            names.append((i.name, i.role))
        inputs.append(tuple(range(start, len(avals))))
    closed = jax.make_jaxpr(lambda *arrays: split_values.run(arrays, inputs))(*avals)
    paths: list[str] = []
    updates: list[str | None] = []
    outputs: list[tuple[int, ...]] = []
    for o, split in zip(graph.outputs, split_values.split_outputs, strict=True):
        start = len(paths)
        count = groups if split else 1
        paths += [piece_name(o.path, g) if split else o.path for g in range(count)]
        kept = o.updates if split or o.updates not in leaves else None
        updates += [piece_name(kept, g) if split and kept is not None else kept for g in range(count)]
        outputs.append(tuple(range(start, len(paths))))
    program = build_graph(closed, graph.name, names, paths, split_values.recorder.labels)
    new = program.graph
    marked = tuple(replace(o, updates=u) for o, u in zip(new.outputs, updates, strict=True))
    final = Graph(new.name, new.inputs, new.operators, marked)
    step = Step(replace(program, graph=final, origins={}), tuple(avals))
    return SplitStep(step, groups, tuple(inputs), tuple(outputs))


def piece_name(name: str, group: int) -> str:
    """Name of the part of a leaf that belongs to a group of layers."""
    return f"{name}#{group}"


@dataclass
class _Value:
    """A value while the step is traced again: whole, or in pieces along a dim."""

    layout: Layout
    arrays: list[Any]

    @property
    def dim(self) -> int | None:
        """The dim that pieces are along; None if it is whole."""
        return next((d for d, axes in enumerate(self.layout.dims) if axes), None)


class _SplitValues:
    """Interprets a step, keeping stacks in pieces."""

    def __init__(self, bound: BoundGraph, groups: int, leaves: set[str]) -> None:
        self.bound, self.groups, self.leaves = bound, groups, leaves
        self.mesh = pseudo_mesh(groups)
        self.recorder = Recorder.after(bound)
        self.env: dict[str, _Value] = {}
        self.made_of_nothing: dict[str, Operator] = {}
        self.split_outputs: tuple[bool, ...] = ()

    def run(self, arrays: Sequence[Any], inputs: Sequence[tuple[int, ...]]) -> list[Any]:
        graph = self.bound.graph
        self.env = {}
        for i, at in zip(graph.inputs, inputs, strict=True):
            layout = _along(i.type.rank, 0) if i.name in self.leaves else Layout.replicated(i.type.rank)
            self.env[i.name] = _Value(layout, [arrays[k] for k in at])
        for op in graph.operators:
            with self.recorder.around(op):
                self._operator(op)
        results: list[Any] = []
        split: list[bool] = []
        for o in graph.outputs:
            if isinstance(o.operand, Literal):
                results.append(jnp.asarray(scalar(o.operand)))
                split.append(False)
                continue
            value = self.env[o.operand]
            grouped = value.dim == 0 and o.updates in self.leaves
            results += value.arrays if grouped else [self.whole(o.operand)]
            split.append(grouped)
        self.split_outputs = tuple(split)
        return results

    def whole(self, operand: Any) -> Any:
        """An operand in one piece."""
        if isinstance(operand, Literal):
            return scalar(operand)
        value = self.env[operand]
        return value.arrays[0] if value.dim is None else jnp.concatenate(value.arrays, axis=value.dim)

    def group_of(self, operand: Any, layout: Layout | None, group: int) -> Any:
        """A piece of an operand."""
        if isinstance(operand, Literal):
            return scalar(operand)
        value = self.env[operand]
        dim = None if layout is None else next((d for d, axes in enumerate(layout.dims) if axes), None)
        if dim is None:
            return self.whole(operand)
        if value.dim == dim:
            return value.arrays[group]
        if value.dim is None and layout is not None and operand in self.made_of_nothing:
            output = self._remade(self.made_of_nothing[operand], layout, group)
            if output is not None:
                return output
        array = self.whole(operand)
        size = array.shape[dim] // self.groups
        return lax.slice_in_dim(array, group * size, (group + 1) * size, axis=dim)

    def _operator(self, op: Operator) -> None:
        graph = self.bound.graph
        if op.primitive == "constant" and op.id in self.bound.constants:
            self._keep(op, [jnp.asarray(self.bound.constants[op.id])])
            return
        bound = self.bound.bounds[op.id]
        states = [None if isinstance(o, Literal) else self.env[o].layout for o in op.operands]
        grouped = any(k is not None and k.axes for k in states)
        if self._needs_nothing(op):
            self.made_of_nothing[op.results[0].name] = op
        if not grouped and not (op.primitive == "scan" and self._is_layers(op)):
            self._keep(op, bind(bound.primitive, bound.params, [self.whole(o) for o in op.operands]))
        elif op.primitive == "scan" and self._is_layers(op):
            self._scan(op, bound)
        elif op.primitive == "optimization_barrier":
            self._barrier(op, bound)
        else:
            types = graph.operand_types(op)
            matched = None
            if not op.regions and not is_generator(op):
                matched = match(op, types, states, zeros_of(graph, op), self.mesh)
            if matched is None:
                self._keep(op, bind(bound.primitive, bound.params, [self.whole(o) for o in op.operands]))
            else:
                self._matched(op, matched)

    def _keep(self, op: Operator, arrays: Sequence[Any]) -> None:
        for v, array in zip(op.results, arrays, strict=True):
            self.env[v.name] = _Value(Layout.replicated(v.type.rank), [array])

    def _needs_nothing(self, op: Operator) -> bool:
        """Whether ``op`` makes one array out of numbers in the program alone, so that any piece of it can be made."""
        if op.effects or op.regions or len(op.results) != 1 or op.primitive == "constant":
            return False
        return all(isinstance(o, Literal) or o in self.made_of_nothing for o in op.operands)

    def _remade(self, op: Operator, layout: Layout, group: int) -> Any | None:
        """The piece ``layout`` of what ``op`` makes, of which the whole would have the size of all layers."""
        types = self.bound.graph.operand_types(op)
        if is_generator(op):
            return self._run(op, Match(tuple(Layout.replicated(t.rank) for t in types), (layout,)), group)[0]
        matched = local_match(op, types, layout, self.mesh)
        return None if matched is None else self._run(op, matched, group)[0]

    def _run(self, op: Operator, matched: Match, group: int) -> list[Any]:
        """Runs ``op`` on the pieces of a group."""
        operands = [self.group_of(o, k, group) for o, k in zip(op.operands, matched.operands, strict=True)]
        return run_on_shards(self.bound, op, matched, operands, self.groups, lambda axes: jnp.int32(group))

    def _matched(self, op: Operator, matched: Match) -> None:
        """Runs an operator group by group; terms of a reduction are joined at once."""
        by_group = [self._run(op, matched, g) for g in range(self.groups)]
        for n, (v, layout) in enumerate(zip(op.results, matched.results, strict=True)):
            split_values = [m[n] for m in by_group]
            if layout.partial:
                total = split_values[0]
                for term in split_values[1:]:
                    total = _JOIN[layout.reduce](total, term)
                self.env[v.name] = _Value(Layout.replicated(v.type.rank), [total])
            elif layout.axes:
                self.env[v.name] = _Value(layout, split_values)
            else:
                self.env[v.name] = _Value(layout, split_values[:1])

    def _barrier(self, op: Operator, bound: Bound) -> None:
        """A barrier for each group: those of other groups need not wait."""
        values = [self.env[str(o)] for o in op.operands]
        whole = [i for i, v in enumerate(values) if v.dim is None]
        passed: dict[int, Any] = {}
        if whole:
            outputs = bind(bound.primitive, bound.params, [values[i].arrays[0] for i in whole])
            passed = dict(zip(whole, outputs, strict=True))
        grouped = [i for i, v in enumerate(values) if v.dim is not None]
        groups = [
            bind(bound.primitive, bound.params, [values[i].arrays[g] for i in grouped]) for g in range(self.groups)
        ]
        for i, v in enumerate(op.results):
            if i in passed:
                self.env[v.name] = _Value(values[i].layout, [passed[i]])
            else:
                self.env[v.name] = _Value(values[i].layout, [outputs[grouped.index(i)] for outputs in groups])

    def _is_layers(self, op: Operator) -> bool:
        """Whether the loop goes over layers: over a stack that is in pieces, or over what such a loop left."""
        scan = Scan.of(op)
        _, _, stacks = scan.split(op.operands)
        return scan.length % self.groups == 0 and any(isinstance(o, str) and self.env[o].dim == 0 for o in stacks)

    def _scan(self, op: Operator, bound: Bound) -> None:
        """One loop a group, one after the other; the last group first where the loop runs backward."""
        scan = Scan.of(op)
        consts, initial, stacked = scan.split(op.operands)
        size = scan.length // self.groups
        fixed = [self.whole(o) for o in consts]
        carry = [self.whole(o) for o in initial]
        _, _, types = scan.split(self.bound.graph.operand_types(op))
        stacks = [_along(t.rank, 0) for t in types]
        rows: dict[int, list[Any]] = {}
        order = range(self.groups)
        for g in reversed(order) if bound.params["reverse"] else order:
            xs = [self.group_of(o, k, g) for o, k in zip(stacked, stacks, strict=True)]
            outputs = bind(bound.primitive, {**bound.params, "length": size}, [*fixed, *carry, *xs])
            carry, rows[g] = scan.split_results(outputs)
        for n, v in enumerate(op.results):
            if n < scan.num_carry:
                self.env[v.name] = _Value(Layout.replicated(v.type.rank), [carry[n]])
            else:
                self.env[v.name] = _Value(_along(v.type.rank, 0), [rows[g][n - scan.num_carry] for g in order])


_JOIN: Mapping[str, Any] = {
    "sum": lax.add, "max": lax.max, "min": lax.min, "and": lax.bitwise_and, "or": lax.bitwise_or,
}  # fmt: skip


def _along(rank: int, dim: int) -> Layout:
    return Layout(tuple((AXIS,) if d == dim else () for d in range(rank)))


def run_on_shards(
    bound: BoundGraph,
    op: Operator,
    matched: Match,
    operands: Sequence[Any],
    count: int,
    number: Callable[[Sequence[str]], Any],
) -> list[Any]:
    """Runs an operator on one of the shards into which layers split its operands.

    Args:
        bound: the graph that it is of.
        op: the operator.
        matched: layouts of its operands and results over `AXIS`.
        operands: the shards.
        count: of shards.
        number: of the shard over mesh axes, an int32 scalar; few operators ask for it.
    """
    types, applied = bound.graph.operand_types(op), bound.bounds[op.id]
    context = LocalContext(
        {AXIS: count},
        types,
        tuple(v.type for v in op.results),
        tuple(k or Layout.replicated(t.rank) for k, t in zip(matched.operands, types, strict=True)),
        matched.results,
        number,
        op=op,
    )
    return localize(applied.primitive, applied.params, list(operands), context)
