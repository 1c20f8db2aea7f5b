"""Builds a `Graph` from a jaxpr and, next to it, the jax objects that running it needs.

Calls (jit, custom derivatives, remat) are opened into the surrounding graph; scan, while and cond
keep their bodies as regions. An opened remat keeps its meaning through an ``optimization_barrier``
on what enters it, as jax's own lowering does.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.dtypes import dtype_name
from autopar._compat.jaxprs import own_constant, plain_params
from autopar._compat.primitives import optimization_barrier_p, sharding_constraint
from autopar._compat.source import source_line
from autopar.frontend.attrs import attrs_of, placed_attrs, result_shardings
from autopar.frontend.bordered import fold_borders
from autopar.frontend.counted import Counting, ValueFacts, batched, entering_regions, is_indexed
from autopar.frontend.equations import (
    PLACING,
    body_of,
    is_differentiated_remat,
    marks_of_equation,
    recomputes,
    without_shardings,
)
from autopar.frontend.fixed_tables import FixedValues, band_attrs, equations_of, is_resizing, resized
from autopar.frontend.folded_padding import fold_padding
from autopar.frontend.manual import is_manual, region
from autopar.frontend.retraced import Labels, Splice, spliced_p
from autopar.ir import Graph, Input, Literal, Operand, Operator, Output, TensorType, Value
from autopar.ir.analysis import live
from autopar.ir.phases import marks_of

_PLAIN = (type(None), bool, int, float, str, tuple, np.dtype, enum.Enum)


@dataclass(frozen=True, eq=False)
class Bound:
    """Data for running one operator: its primitive, parameters, and regions by name."""

    primitive: Primitive
    params: Mapping[str, Any]
    regions: Mapping[str, BoundGraph]


@dataclass(frozen=True, eq=False)
class BoundGraph:
    """A graph with the primitives, parameters and constants that jax binds to run its operators.

    Args:
        graph: the graph.
        bounds: by operator id its primitive and parameters.
        constants: arrays by the id of ``constant`` operators.
        origins: for operators of a function that interprets another graph the id of the operator there.
        labels: what marks in the name stacks of its regions stand for; None where there are none.
        spliced: number of its operators, outside of regions, that were taken over from another graph without jax.
    """

    graph: Graph
    bounds: Mapping[str, Bound]
    constants: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    labels: Labels | None = None
    spliced: int = 0


def tensor_type(aval: Any) -> TensorType:
    """The `TensorType` of a jax abstract value; tokens and refs have no shape."""
    return TensorType(tuple(int(d) for d in getattr(aval, "shape", ())), dtype_name(getattr(aval, "dtype", "token")))


#: Graphs of bodies by the identity of the jaxpr, the name of the region, and how its inputs count.
_Bodies = dict[tuple[int, str, tuple[Counting, ...]], BoundGraph]


class _GraphBuilder:
    """Walks a jaxpr once, collecting operators. Used by `build_graph` alone."""

    def __init__(self, labels: Labels | None = None) -> None:
        self.labels = labels
        self.origin: str | None = None
        self.origins: dict[str, str] = {}
        self.operators: list[Operator] = []
        self.bounds: dict[str, Bound] = {}
        self.constants: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.source = ""
        self.marks: tuple[str, ...] = ()
        self.in_remat = False
        self.seen: dict[tuple[Any, ...], list[Operand]] = {}
        self.types: dict[str, TensorType] = {}
        self.producers: dict[str, Operator] = {}
        self.given: dict[str, Any] = {}
        self.entering: dict[str, Counting] = {}
        self.facts = ValueFacts(self.producers, self.types, self.given, self.entering)
        self.fixed = FixedValues(self.producers)
        self.taken_over: set[str] = set()
        self.bodies: _Bodies = {}

    def fresh(self, scope: str, primitive: str) -> str:
        stem = f"{scope}/{primitive}" if scope else primitive
        self.counts[stem] += 1
        return f"{stem}.{self.counts[stem] - 1}"

    def read(self, env: Mapping[Any, Operand], atom: Any) -> Operand:
        if isinstance(atom, JaxLiteral):
            return self.literal(atom.val, tensor_type(atom.aval))
        return env[atom]

    def literal(self, value: Any, type: TensorType) -> Operand:
        if getattr(value, "dtype", None) == jax.dtypes.float0:
            value = np.zeros(type.shape, np.bool_)
        if type.shape == () and not type.dtype.startswith("key<"):
            return Literal(repr(np.asarray(value).item() if type.dtype != "bf16" else float(value)), type)
        return self.constant(value, type)

    def constant(self, value: Any, type: TensorType) -> str:
        name = self.fresh("", "constant")
        self.operators.append(Operator(name, "constant", (), (Value(name, type),)))
        self.constants[name] = self.given[name] = own_constant(value)
        return name

    def jaxpr(
        self, jaxpr: Jaxpr, operands: Sequence[Operand], scope: str, constants: Sequence[Operand] = ()
    ) -> list[Operand]:
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update(zip(jaxpr.constvars, constants, strict=True))
        for eqn in jaxpr.eqns:
            where = "/".join(s for s in (scope, str(eqn.source_info.name_stack)) if s)
            inputs = [self.read(env, v) for v in eqn.invars]
            # jax keeps one jaxpr of a jitted function, so that what is in it may not know who calls.
            outside = self.source, self.marks, self.in_remat
            label = None if self.labels is None else self.labels.origin(where)
            if label is None:
                self.marks = marks_of(self.marks, marks_of_equation(eqn, self.in_remat))
            else:
                where, self.origin, self.marks = label.scope, label.id, label.marks
            line = None if label is None else label.source
            self.source = (source_line(eqn.source_info) or self.source) if line is None else line
            self.in_remat = self.in_remat or is_differentiated_remat(eqn)
            results = self.equation(eqn, inputs, where)
            (self.source, self.marks, self.in_remat), self.origin = outside, None
            env.update(zip(eqn.outvars, results, strict=True))
        return [self.read(env, v) for v in jaxpr.outvars]

    def closed(self, jaxpr: Any, operands: Sequence[Operand], scope: str) -> list[Operand]:
        if not isinstance(jaxpr, ClosedJaxpr):
            return self.jaxpr(jaxpr, operands, scope)
        constants = [
            self.literal(c, tensor_type(v.aval)) for c, v in zip(jaxpr.consts, jaxpr.jaxpr.constvars, strict=True)
        ]
        return self.jaxpr(jaxpr.jaxpr, operands, scope, constants)

    def equation(self, eqn: JaxprEqn, inputs: list[Operand], scope: str) -> Sequence[Operand]:
        if eqn.primitive is spliced_p:
            return self.spliced(eqn.params["splice"], inputs)
        if is_manual(eqn):
            return self.closed(region(eqn), inputs, scope)
        opened = body_of(eqn)
        if opened is not None:
            body, taken = opened
            if recomputes(eqn):
                inputs = self.barrier(inputs, [tensor_type(v.aval) for v in eqn.invars], scope)
            results = self.closed(body, [inputs[i] for i in taken], scope)
            return self.placed(eqn, results, scope)
        types = [tensor_type(v.aval) for v in eqn.outvars]
        if eqn.primitive is optimization_barrier_p:
            return self.barrier(inputs, types, scope)
        if eqn.primitive.name == "scan" and not eqn.params["length"]:
            return self.no_trips(eqn, inputs, scope)
        regions = region_graphs(eqn, [self.facts.counting(o) for o in inputs], self.labels, self.bodies)
        params: Mapping[str, Any] = without_shardings(eqn)
        if is_resizing(eqn.primitive.name):
            results = self.resized(eqn, inputs, scope)
            if results:
                return results
        if is_indexed(eqn.primitive.name):
            params, inputs = self.counted(eqn.primitive.name, params, inputs, scope)
        if eqn.primitive.name == "reshape" and params.get("dimensions") is not None:
            params, inputs = self.transposed(params, inputs, tensor_type(eqn.invars[0].aval), scope)
        return self.operator(
            eqn.primitive,
            params,
            inputs,
            types,
            scope,
            self.source,
            regions,
            tuple(sorted(type(e).__name__ for e in eqn.effects)),
        )

    def spliced(self, splice: Splice, inputs: Sequence[Operand]) -> list[Operand]:
        """Results of operators of another graph, which this one takes over."""
        env: dict[str, Operand] = dict(zip(splice.taken, inputs, strict=True))
        outside = self.source, self.marks, self.origin
        for op in splice.operators:
            bound = splice.bounds[op.id]
            operands = [env[o] if isinstance(o, str) else o for o in op.operands]
            types = [v.type for v in op.results]
            self.source, self.marks, self.origin = op.source, op.marks, splice.origins.get(op.id, op.id)
            if bound.primitive is optimization_barrier_p:
                results = self.barrier(operands, types, op.scope)
            else:
                regions = {name: _without_origins(r, self.labels) for name, r in bound.regions.items()}
                results = self.operator(
                    bound.primitive, bound.params, operands, types, op.scope, op.source, regions, op.effects
                )
            env.update(zip((v.name for v in op.results), results, strict=True))
            self.taken_over.update(self.producers[name].id for name in results if name in self.producers)
        self.source, self.marks, self.origin = outside
        return [env[name] for name in splice.results]

    def resized(self, eqn: JaxprEqn, inputs: list[Operand], scope: str) -> list[Operand]:
        """Results of a read or write at fixed positions as a broadcast or slice; empty where it is none."""
        types = [tensor_type(v.aval) for v in eqn.invars]
        function = resized(eqn.primitive.name, eqn.params, types, lambda: self.fixed.value(inputs[1]))
        if function is None or isinstance(inputs[0], Literal):
            return []
        return self.function(function, (inputs[0], inputs[-1]), (types[0], types[-1]), scope)

    def function(
        self, function: Callable[..., Any], operands: Sequence[Operand], types: Sequence[TensorType], scope: str
    ) -> list[Operand]:
        """Results of a function of jax, whose equations are operators of the line that is built."""
        jaxpr = equations_of(function, types)
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, operands, strict=True))
        for e in jaxpr.eqns:
            read, of_results = [self.read(env, v) for v in e.invars], [tensor_type(v.aval) for v in e.outvars]
            results = self.plain(e.primitive, without_shardings(e), read, of_results, scope)
            env.update(zip(e.outvars, results, strict=True))
        return [self.read(env, v) for v in jaxpr.outvars]

    def counted(
        self, primitive: str, params: Mapping[str, Any], inputs: list[Operand], scope: str
    ) -> tuple[Mapping[str, Any], list[Operand]]:
        """Parameters and operands of a read or write, with batching dims where its indices count."""
        rewritten = batched(primitive, params, inputs, self.facts)
        if rewritten is None:
            return params, inputs
        indices = inputs[1]
        type = self.types[str(indices)]
        joined = self.producers.get(str(indices))
        if joined is not None:
            columns = [joined.operands[n] for n in rewritten.columns]
            one = TensorType((*type.shape[:-1], 1), type.dtype)
            index = self.function(_joined, columns, [one] * len(columns), scope)
        else:
            index = self.function(functools.partial(_columns, places=rewritten.columns), [indices], [type], scope)
        return rewritten.params, [inputs[0], *index, *inputs[2:]]

    def placed(self, eqn: JaxprEqn, results: list[Operand], scope: str) -> list[Operand]:
        """Results of an inner ``jax.jit``, each through a constraint where the user gave it a sharding."""
        out = list(results)
        for n, sharding in enumerate(result_shardings(eqn)):
            if sharding is not None and not isinstance(out[n], Literal):
                type = tensor_type(eqn.outvars[n].aval)
                constraint = sharding_constraint(type.shape, sharding)
                (out[n],) = self.plain(constraint.primitive, constraint.params, [out[n]], [type], scope)
        return out

    def transposed(
        self, params: Mapping[str, Any], inputs: list[Operand], type: TensorType, scope: str
    ) -> tuple[Mapping[str, Any], list[Operand]]:
        """A reshape that reads the dims in another order, as a plain one after a transpose: parameters, operands."""
        order = tuple(int(d) for d in params["dimensions"])
        moved = TensorType(tuple(type.shape[d] for d in order), type.dtype)
        results = self.plain(jax.lax.transpose_p, {"permutation": order}, inputs[:1], [moved], scope)
        return {**params, "dimensions": None}, results

    def barrier(self, inputs: list[Operand], types: list[TensorType], scope: str) -> list[Operand]:
        held = [i for i, operand in enumerate(inputs) if not isinstance(operand, Literal)]
        if not held:
            return inputs
        values = [inputs[i] for i in held]
        results = self.plain(optimization_barrier_p, {}, values, [types[i] for i in held], scope)
        out = list(inputs)
        for i, result in zip(held, results, strict=True):
            out[i] = result
        return out

    def no_trips(self, eqn: JaxprEqn, inputs: list[Operand], scope: str) -> list[Operand]:
        """Results of a loop that never runs its body: what it would carry, and empty stacks."""
        params = plain_params("scan", eqn.params)
        first, carries = params["num_consts"], params["num_carry"]
        stacks: list[Operand] = []
        for v in eqn.outvars[carries:]:
            aval: Any = v.aval
            empty = equations_of(functools.partial(jax.lax.full, aval.shape, 0, aval.dtype), ())
            stacks += self.jaxpr(empty, [], scope)
        return [*inputs[first : first + carries], *stacks]

    def undone(self, name: str, operand: Operand, type: TensorType) -> Operand | None:
        """The value that a reshape gives back by undoing the reshape that made ``operand``; None where it does not.

        `jax.shard_map` keeps what the backward pass needs with the devices in the first dim, in front of the examples.
        """
        producer = self.producers.get(operand) if name == "reshape" and isinstance(operand, str) else None
        if producer is None or not _is_plain_reshape(producer) or not isinstance(producer.operands[0], str):
            return None
        return producer.operands[0] if self.types.get(producer.operands[0]) == type else None

    def plain(
        self,
        primitive: Primitive,
        params: Mapping[str, Any],
        operands: Sequence[Operand],
        types: Sequence[TensorType],
        scope: str,
    ) -> list[Operand]:
        """An operator without regions and effects, of the line of the equation that is built."""
        return self.operator(primitive, params, operands, types, scope, self.source, {}, ())

    def operator(
        self,
        primitive: Primitive,
        params: Mapping[str, Any],
        operands: Sequence[Operand],
        types: Sequence[TensorType],
        scope: str,
        source: str,
        regions: Mapping[str, BoundGraph],
        effects: tuple[str, ...],
    ) -> list[Operand]:
        if len(types) == 1 and _is_identity(primitive.name, params, operands, types[0]):
            known = self.types.get(str(operands[0]))
            if known == types[0]:
                return [operands[0]]
            undone = self.undone(primitive.name, operands[0], types[0])
            if undone is not None:
                return [undone]
        attrs = attrs_of(plain_params(primitive.name, params))
        if primitive.name in PLACING:
            attrs = tuple(sorted((*attrs, *placed_attrs(primitive.name, params, len(types[0].shape)))))
        if primitive.name == "dot_general":
            attrs = tuple(sorted((*attrs, *band_attrs(params, operands, self.fixed))))
        key = (primitive.name, repr(attrs), tuple(operands), tuple(types))  # by text: 1, 1.0 and True are equal
        if _may_merge(primitive, params, regions, effects) and key in self.seen:
            return self.seen[key]
        id = self.fresh(scope, primitive.name)
        if self.origin is not None:
            self.origins[id] = self.origin
        names = [id] if len(types) == 1 else [f"{id}:{i}" for i in range(len(types))]
        values = tuple(Value(n, t) for n, t in zip(names, types, strict=True))
        bodies = tuple((k, r.graph) for k, r in regions.items())
        self.operators.append(
            Operator(id, primitive.name, tuple(operands), values, attrs, bodies, source, scope, effects, self.marks)
        )
        self.bounds[id] = Bound(primitive, MappingProxyType(dict(params)), MappingProxyType(dict(regions)))
        results: list[Operand] = list(names)
        self.types.update(zip(names, types, strict=True))
        self.producers.update((n, self.operators[-1]) for n in names)
        self.seen[key] = results
        return results


def _joined(*columns: jax.Array) -> jax.Array:
    return jax.lax.concatenate(columns, columns[0].ndim - 1) if len(columns) > 1 else columns[0]


def _columns(indices: jax.Array, places: Sequence[int]) -> jax.Array:
    return _joined(*(jax.lax.slice_in_dim(indices, n, n + 1, axis=indices.ndim - 1) for n in places))


def _without_origins(bound: BoundGraph, labels: Labels | None) -> BoundGraph:
    """A region of a graph that is traced again: what its operators stood for then is no operator of that graph."""
    return replace(bound, origins=MappingProxyType({}), labels=labels)


def _is_plain_reshape(op: Operator) -> bool:
    return op.primitive == "reshape" and op.attr("dimensions") is None


def _is_identity(name: str, params: Mapping[str, Any], operands: Sequence[Operand], type: TensorType) -> bool:
    """Whether an equation returns its only operand, if that has the same type."""
    if len(operands) != 1:
        return False
    if name == "rev":
        return all(type.shape[d] == 1 for d in params["dimensions"])
    if name == "transpose":
        moved = [d for d in params["permutation"] if type.shape[params["permutation"].index(d)] != 1]
        return moved == sorted(moved)
    if name == "reshape":  # it may read the dims in another order
        return params.get("dimensions") is None
    return name in ("convert_element_type", "squeeze", "expand_dims", "copy")


def _may_merge(
    primitive: Primitive, params: Mapping[str, Any], regions: Mapping[str, BoundGraph], effects: tuple[str, ...]
) -> bool:
    """Whether two equations with equal plain parameters and operands are one: XLA merges them as well.

    Not where a parameter has no plain form (it could differ), and not for barriers, which exist to keep apart.
    """
    if regions or effects or primitive.name in ("optimization_barrier", "random_seed", "rng_uniform"):
        return False
    return all(isinstance(v, _PLAIN) for v in params.values())


def region_graphs(
    eqn: JaxprEqn, counting: Sequence[Counting], labels: Labels | None, known: _Bodies
) -> dict[str, BoundGraph]:
    """Bodies of a scan, while or cond equation by name; empty for any other.

    Args:
        eqn: the equation.
        counting: how its operands count.
        labels: of `build_graph`.
        known: graphs of bodies that were built before, to which new ones are added: the loops over groups of layers
            share one body.
    """
    name, params = eqn.primitive.name, eqn.params
    bodies: dict[str, ClosedJaxpr] = {}
    if name == "scan":
        bodies = {"body": params["jaxpr"]}
    elif name == "while":
        bodies = {"cond": params["cond_jaxpr"], "body": params["body_jaxpr"]}
    elif name == "cond":
        bodies = {str(i): b for i, b in enumerate(params["branches"])}
    entering = entering_regions(name, params, counting)
    keys = {k: (id(body), k, tuple(entering[k])) for k, body in bodies.items()}
    for k, body in bodies.items():
        if keys[k] not in known:
            known[keys[k]] = build_graph(body, k, labels=labels, entering=entering[k])
    return {k: known[key] for k, key in keys.items()}


def build_graph(
    closed: ClosedJaxpr,
    name: str,
    inputs: Sequence[tuple[str, str]] | None = None,
    out_paths: Sequence[str] | None = None,
    labels: Labels | None = None,
    constant_inputs: bool = False,
    entering: Sequence[Counting] = (),
) -> BoundGraph:
    """The graph of a closed jaxpr.

    Args:
        closed: the jaxpr.
        name: name of the graph.
        inputs: name and role of each input; ``in.0``, ``in.1``.. of role "other" where None.
        out_paths: text path of each output; ``out.0``.. where None.
        labels: what marks in the name stacks stand for, where the function interprets another graph.
        constant_inputs: whether the jaxpr's constants become further inputs of role "constant", so that large arrays
            are arguments of the program. Otherwise they become ``constant`` operators, as those of inner jaxprs do.
        entering: how the first inputs count, as far as known.
    """
    jaxpr = closed.jaxpr
    builder = _GraphBuilder(labels)
    variables = list(jaxpr.invars)
    named = list(inputs or ((f"in.{i}", "other") for i in range(len(variables))))
    count = len(variables)
    if constant_inputs:
        named += [(f"closed_over.{i}", "constant") for i in range(len(jaxpr.constvars))]
        variables += jaxpr.constvars
    names = [n for n, _ in named]
    builder.types.update((n, tensor_type(v.aval)) for n, v in zip(names, variables, strict=True))
    builder.entering.update(zip(names, entering, strict=False))
    if constant_inputs:
        builder.given.update(zip(names[count:], closed.consts, strict=True))
        operands = builder.jaxpr(jaxpr, names[:count], "", names[count:])
    else:
        operands = builder.closed(closed, names, "")
    fixed, params_of = builder.fixed.value, lambda id: builder.bounds[id].params
    bordered, results, bounds = fold_borders(builder.operators, operands, builder.types, params_of, fixed)
    for id, (primitive, params) in bounds.items():
        builder.bounds[id] = replace(builder.bounds[id], primitive=primitive, params=MappingProxyType(dict(params)))
    built, results, changed = fold_padding(bordered, results, params_of, fixed)
    for id, params in changed.items():
        builder.bounds[id] = replace(builder.bounds[id], params=MappingProxyType(dict(params)))
    outputs = tuple(
        Output(operand, path, tensor_type(v.aval))
        for operand, path, v in zip(
            results, out_paths or [f"out.{i}" for i in range(len(results))], jaxpr.outvars, strict=True
        )
    )
    arguments = tuple(Input(n, tensor_type(v.aval), role) for (n, role), v in zip(named, variables, strict=True))
    operators = tuple(live(built, (o.operand for o in outputs)))
    alive = {op.id for op in operators}
    return BoundGraph(
        Graph(name, arguments, operators, outputs),
        MappingProxyType({k: b for k, b in builder.bounds.items() if k in alive}),
        MappingProxyType({k: c for k, c in builder.constants.items() if k in alive}),
        MappingProxyType({k: o for k, o in builder.origins.items() if k in alive}),
        labels,
        len(alive & builder.taken_over),
    )
