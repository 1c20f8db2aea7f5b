"""Runs a planned graph on one device's shards, inside ``jax.shard_map``.

Every operator is applied by its localizer; before it, operands are resharded to the layouts that the
plan wants. Loops and branches run jax's own, with bodies interpreted here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.primitives import bind, switched
from autopar._compat.xla import on_host
from autopar.frontend import Bound, BoundGraph
from autopar.frontend.while_loop import while_loop
from autopar.ir import Graph, Layout, Literal, Operand, Operator, TensorType
from autopar.ir.loops import Scan, While
from autopar.ir.phases import RECOMPUTED, phase_of
from autopar.ir.primitives import is_generator, is_zero
from autopar.ir.transposed_products import swapped, transposed_products
from autopar.lower.barriers import CollectiveBarriers, not_before, splits_inside
from autopar.lower.callbacks import Callbacks
from autopar.lower.collective_matmul import BlockProduct
from autopar.lower.hosted import to_device, to_host
from autopar.lower.in_place import after_layer, ends_layer, numbers_in_place, scan_in_place
from autopar.lower.localize.base import AxisIndex, LocalContext, scalar
from autopar.lower.localize.registry import localize
from autopar.lower.values import ComputedValue, Held, converted_inside, rows_as_bits, taken_in_slices
from autopar.sharding.collective_matmul import OPERANDS
from autopar.sharding.reshard import PathTables
from autopar.sharding.routes import Routes
from autopar.sharding.rules.dot import band

Env: TypeAlias = dict[str, "Held | ComputedValue"]


@dataclass(frozen=True)
class Sharded:
    """The plan's decisions, parsed: layouts of operands (None: any) and results, shared copies.

    ``memory_bound`` says that memory is short, so that copies are made late and given up early; ``index`` says which
    shard the interpreted one is; ``around`` is entered while an operator is applied; ``recomputes`` says that something
    is computed again, which a compiler must not merge with the first time; ``orders_collectives`` that collectives must
    not overlap with regions that have some inside (`autopar.lower.barriers`); ``widened`` that products with a float32
    result take float32 operands, for XLA's CPU compiler has none of narrow ones; ``swaps_products`` that a product
    which a transposition alone reads takes its operands the other way round (`autopar.ir.transposed_products`);
    ``hosted`` names inputs that are in host memory until they are read; ``host_results`` are, by loop, the numbers of
    results that are there; ``on_host`` are ids of operators on hosts, ``skips_masked`` of attention that leaves scores
    out; ``matmuls`` says of which tensor of a product blocks travel, ``in_steps`` that each message waits for a
    product; ``callbacks`` says how Python is called.
    """

    operands: Mapping[str, tuple[Layout | None, ...]]
    results: Mapping[str, tuple[Layout, ...]]
    copies: Mapping[str, Mapping[str, Layout]]
    tables: PathTables
    memory_bound: bool = False
    index: AxisIndex = lax.axis_index
    around: Callable[[Operator], AbstractContextManager[Any]] = nullcontext
    recomputes: bool = False
    orders_collectives: bool = False
    widened: bool = False
    swaps_products: bool = False
    hosted: frozenset[str] = frozenset()
    host_results: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    on_host: frozenset[str] = frozenset()
    skips_masked: frozenset[str] = frozenset()
    matmuls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    in_steps: bool = False
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return self.tables.mesh.sizes


@dataclass
class Interpreter:
    """Interprets one bound graph and, through `inside`, the graphs of its regions.

    Args:
        sharded: the plan's decisions.
        prefix: ids of enclosing operators and regions, each followed by ``/``.
        phase: phase of the enclosing operator.
        barriers: of this graph, where the plan's decisions want some.
        turned: results of products with swapped operands, in the order that a transposition reads, by the product's.
    """

    sharded: Sharded
    prefix: str = ""
    phase: str = "update"
    barriers: CollectiveBarriers | None = None
    turned: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sharded.orders_collectives and self.barriers is None:
            self.barriers = CollectiveBarriers()

    def held(self, name: str, type: TensorType, layout: Layout, array: Any, age: int = 0) -> Held:
        """The value ``name`` of this graph, made in ``layout``.

        Args:
            name: of the value.
            type: its shape and dtype.
            layout: in which it is made.
            array: its local shard.
            age: number of the last region with collectives inside that it depends on.
        """
        copies = dict(self.sharded.copies.get(self.prefix + name, {}))
        return self._held(type, layout, array, copies, age)

    def _held(self, type: TensorType, layout: Layout, array: Any, copies: dict[str, Layout], age: int = 0) -> Held:
        s = self.sharded
        routes = Routes(s.tables, type, layout, copies, s.memory_bound)
        return Held(routes, {("", layout): array}, s.index, self.barriers, age)

    def run(
        self, bound: BoundGraph, arrays: Sequence[Any], layouts: Sequence[Layout], wanted: Sequence[Layout]
    ) -> list[Any]:
        """Outputs of a graph.

        Args:
            bound: the graph.
            arrays: local shards of its inputs, in ``layouts``.
            layouts: one an input.
            wanted: layout of each output.
        """
        graph = bound.graph
        env: Env = {
            i.name: self.held(i.name, i.type, layout, array)
            for i, layout, array in zip(graph.inputs, layouts, arrays, strict=True)
        }
        for name in (n for n in env if self.prefix + n in self.sharded.hosted):
            value = env[name]
            assert isinstance(value, Held)
            value.away = True
        phase = self.phase
        for op in graph.operators:
            self.phase = phase_of(op, phase)
            with self.sharded.around(op):
                self._operator(bound, op, env)
        self.phase = phase
        results = []
        for o, layout in zip(graph.outputs, wanted, strict=True):
            source = env.get(o.operand) if isinstance(o.operand, str) else None
            if isinstance(source, Held) and source.stays_on_host(layout):
                results.append(source.as_stored())
            else:
                results.append(self.read(env, o.operand, o.type, layout, "update" if not self.prefix else phase))
        return results

    def read(
        self, env: Env, operand: Operand, type: TensorType, layout: Layout | None, phase: str, now: Any = None
    ) -> Any:
        """An operand's local shard.

        Args:
            env: values so far, by name.
            operand: name of a value, or a literal.
            type: shape and dtype of the operand.
            layout: layout that is wanted; None takes any.
            phase: part of the step that the reader is in.
            now: another operand of the reader: where memory is short a copy is not made before it is there.
        """
        if isinstance(operand, Literal):
            value = scalar(operand)
            if layout is None or layout.is_replicated:
                return value
            first = self.sharded.index(layout.partial) == 0  # a scalar as a partial sum: one device has it
            return jnp.where(first, value, jnp.zeros_like(value))
        return env[operand].take(layout or Layout.replicated(type.rank), phase, now)

    def _operands(
        self, env: Env, op: Operator, types: Sequence[TensorType], wanted: Sequence[Layout | None]
    ) -> list[Any]:
        """Operands of ``op``. Where memory is short, copies are made last and wait for the other operands."""
        sources = [env.get(o) if isinstance(o, str) else None for o in op.operands]
        late = [
            isinstance(s, Held) and s.routes.memory_bound and k is not None and bool(s.routes.pending(k, self.phase))
            for s, k in zip(sources, wanted, strict=True)
        ]
        operands: dict[int, Any] = {}
        now = None
        for i in sorted(range(len(sources)), key=lambda i: late[i]):
            if late[i] and now is None:
                now = next((operands[j] for j in operands if isinstance(sources[j], Held) and not late[j]), None)
            operands[i] = self.read(env, op.operands[i], types[i], wanted[i], self.phase, now)
        return [operands[i] for i in range(len(sources))]

    def _there(self, env: Env, operand: Operand, type: TensorType, layout: Layout | None) -> Any:
        """An operand's local shard in host memory."""
        value = env[operand] if isinstance(operand, str) else None
        if isinstance(value, Held):
            return value.take_on_host(layout or Layout.replicated(type.rank), self.phase)
        return to_host(self.read(env, operand, type, layout, self.phase))

    def _operator(self, bound: BoundGraph, op: Operator, env: Env) -> None:
        if is_generator(op):
            (result,) = op.results
            make = self._maker(bound, op, result.type)
            env[result.name] = ComputedValue(result.type, make, self.sharded.index, is_zero(op))
        elif op.primitive == "optimization_barrier":
            self._barrier(bound, op, env)
        elif op.primitive == "wire":
            self._wire(bound, op, env)
        elif op.regions and op.primitive in ("scan", "while", "cond"):
            run = {"scan": self._scan, "while": self._while, "cond": self._cond}[op.primitive]
            run(bound.bounds[op.id], bound.graph, op, env)
        else:
            self._plain(bound.bounds[op.id], bound.graph, op, env)

    def _plain(self, bound: Bound, graph: Graph, op: Operator, env: Env) -> None:
        id = self.prefix + op.id
        types = graph.operand_types(op)
        wanted, results = self.sharded.operands[id], self.sharded.results[id]
        there = id in self.sharded.on_host
        context = LocalContext(
            self.sharded.sizes,
            types,
            tuple(v.type for v in op.results),
            tuple(k or Layout.replicated(t.rank) for k, t in zip(wanted, types, strict=True)),
            results,
            self.sharded.index,
            functools.partial(self._send, _age(env, op)),
            skips_masked=id in self.sharded.skips_masked,
            op=op,
            callbacks=self.sharded.callbacks,
        )

        params_swapped = None if there else self._swapped(bound, graph, op)

        def apply(*operands: Any, dtype: Any = None) -> Sequence[Any]:
            params = bound.params if dtype is None else {**bound.params, "preferred_element_type": dtype}
            wide = all(v.type.dtype == "f32" for v in op.results) if dtype is None else dtype == jnp.float32
            if self.sharded.widened and op.primitive == "dot_general" and wide:
                operands = tuple(o.astype(jnp.float32) for o in operands)
            if op.primitive == "transpose" and op.operands[0] in self.turned:
                return [self.turned.pop(str(op.operands[0]))]
            if params_swapped is not None:
                left = operands[0].ndim - len(params["dimension_numbers"][0][0])
                (turned,) = bind(bound.primitive, params_swapped, operands[::-1])
                self.turned[op.results[0].name] = turned
                return [jnp.moveaxis(turned, range(-left, 0), range(left))]
            return localize(bound.primitive, params, list(operands), context)

        travels = self.sharded.matmuls.get(id, "")
        if travels:
            self._in_blocks(op, travels, env, context, lambda *o, dtype=None: apply(*o, dtype=dtype)[0])
            return
        taken = zip(op.operands, types, wanted, strict=True)
        operands = [self._there(env, *o) for o in taken] if there else self._operands(env, op, types, wanted)
        outputs = on_host(apply, operands) if there else apply(*operands)
        outputs = rows_as_bits(graph, op, outputs) if self.sharded.memory_bound else outputs
        age = _age(env, op)
        for v, layout, array in zip(op.results, results, outputs, strict=True):
            held = self.held(v.name, v.type, layout, array, age)
            held.away = there
            env[v.name] = held

    def _swapped(self, bound: Bound, graph: Graph, op: Operator) -> dict[str, Any] | None:
        """Parameters of a product with swapped operands, where a transposition alone reads it, in the layout it has."""
        reader = graph.fact(transposed_products).get(op.id) if self.sharded.swaps_products else None
        if reader is None or self.prefix + op.id in self.sharded.matmuls or band(op) is not None:
            return None
        wanted, results = self.sharded.operands[self.prefix + reader], self.sharded.results[self.prefix + op.id]
        stays = wanted[0] in (None, results[0]) and self.prefix + reader not in self.sharded.on_host
        return swapped(bound.params) if stays else None

    def _in_blocks(
        self, op: Operator, travels: str, env: Env, context: LocalContext, apply: Callable[..., Any]
    ) -> None:
        """A product in blocks next to a gather before it, or a scatter after it, where the value takes such a step."""
        product = BlockProduct(op, context, self.sharded.tables.mesh.names, apply, self.sharded.in_steps)
        (result,), age = op.results, _age(env, op)
        types, wanted = context.operand_types, context.operand_layouts
        if travels == "result":
            held = self.held(result.name, result.type, context.result_layouts[0], None, age)
            held.arrays.clear()
            held.unmade = product.unmade(*self._operands(env, op, types, wanted))
        else:
            n = OPERANDS.index(travels)
            other = self.read(env, op.operands[1 - n], types[1 - n], wanted[1 - n], self.phase)
            source = env[str(op.operands[n])]
            assert isinstance(source, Held), f"{op.operands[n]} is computed on every device, nothing is sent"
            taken = source.take(wanted[n], self.phase, other, product.gathered(n, other))
            array = apply(*((taken, other) if n == 0 else (other, taken))) if product.result is None else product.result
            held = self.held(result.name, result.type, context.result_layouts[0], array, age)
        env[result.name] = held

    def _send(self, age: int, permute: Callable[[Any], Any], piece: Any) -> Any:
        """Sends a shard by a collective of an operator, see `LocalContext.send`; ``age`` as in `Held`."""
        if self.barriers is None:
            return permute(piece)
        output = permute(self.barriers.collective(piece, age))
        self.barriers.collected(output)
        return output

    def _maker(self, bound: BoundGraph, op: Operator, type: TensorType) -> Any:
        def make(layout: Layout) -> Any:
            if op.primitive == "constant":
                whole = jnp.asarray(bound.constants[op.id])
                return self._held(type, Layout.replicated(type.rank), whole, {}).take(layout, "")
            b = bound.bounds[op.id]
            operands = [scalar(o) for o in op.operands if isinstance(o, Literal)]
            scalars = tuple(o.type for o in op.operands if isinstance(o, Literal))
            context = LocalContext(
                self.sharded.sizes,
                scalars,
                (type,),
                tuple(Layout.replicated(0) for _ in scalars),
                (layout,),
                self.sharded.index,
            )
            return localize(b.primitive, b.params, operands, context)[0]

        return make

    def _barrier(self, graph: BoundGraph, op: Operator, env: Env) -> None:
        bound = graph.bounds[op.id]
        sources = [env[str(o)] for o in op.operands]
        held = [(i, s) for i, s in enumerate(sources) if isinstance(s, Held)]
        shards = [s.take(s.layout, "") for _, s in held]
        if self.sharded.orders_collectives and ends_layer(op) and len(held) == len(sources):
            passed = after_layer(graph.graph, op, shards)
        else:
            passed = bind(bound.primitive, bound.params, shards)
        after = {i: array for (i, _), array in zip(held, passed, strict=True)}
        if self.sharded.recomputes and RECOMPUTED in op.marks and len(held) > 1:
            # State is there in any case; what another program left is to be taken no earlier than it is needed.
            inputs = {i.name for i in graph.graph.inputs if i.role != "activation"}
            last = held[-1][0]  # the cotangent, where there is one
            late = [i for i in after if op.operands[i] not in inputs]
            # Where all but that is state or the batch, the smallest array waits: without it nothing would.
            others = [i for i in after if i != last and jnp.issubdtype(after[i].dtype, jnp.floating)]
            late = late if set(late) - {last} or not others else [min(others, key=lambda i: after[i].size)]
            after.update((i, not_before(after[i], after[last])) for i in late)
        for i, (source, result) in enumerate(zip(sources, op.results, strict=True)):
            if isinstance(source, Held):
                env[result.name] = self.held(result.name, result.type, source.layout, after[i], source.age)
            else:
                env[result.name] = source

    def _wire(self, graph: BoundGraph, op: Operator, env: Env) -> None:
        (result,), source = op.results, env[str(op.operands[0])]
        if not isinstance(source, Held):
            env[result.name] = source
            return
        held = self.held(result.name, result.type, source.layout, source.take(source.layout, ""), source.age)
        held.routes.tables = self.sharded.tables.sending(graph.bounds[op.id].params["format"])
        env[result.name] = held

    # -- regions -------------------------------------------------------------------------------

    def inside(self, op: Operator, region: str) -> Interpreter:
        """The interpreter of a region of ``op``."""
        return Interpreter(self.sharded, f"{self.prefix}{op.id}/{region}/", self.phase)

    def _enter(self, graph: Graph, op: Operator, env: Env) -> tuple[list[Any], list[Layout]]:
        types = graph.operand_types(op)
        wanted = self.sharded.operands[self.prefix + op.id]
        layouts = [k or Layout.replicated(t.rank) for k, t in zip(wanted, types, strict=True)]
        away = taken_in_slices(env, op, layouts)
        arrays = [
            away[n].as_stored() if n in away else self.read(env, o, t, k, self.phase)
            for n, (o, t, k) in enumerate(zip(op.operands, types, layouts, strict=True))
        ]
        arrays = [jnp.asarray(a) if isinstance(a, np.ndarray | np.generic) else a for a in arrays]
        if self.barriers is not None and self._splits(op):
            here = [n for n in range(len(arrays)) if n not in away]
            for n, array in zip(here, self.barriers.enter([arrays[n] for n in here], _age(env, op)), strict=True):
                arrays[n] = array
        return arrays, layouts

    def _leave(self, op: Operator, env: Env, arrays: Sequence[Any]) -> None:
        age = _age(env, op)
        there = self.sharded.host_results.get(self.prefix + op.id, ())
        if self.barriers is not None and self._splits(op):
            self.barriers.leave([array for n, array in enumerate(arrays) if n not in there])
            age = self.barriers.regions
        layouts = self.sharded.results[self.prefix + op.id]
        for n, (v, layout, array) in enumerate(zip(op.results, layouts, arrays, strict=True)):
            held = self.held(v.name, v.type, layout, array, age)
            held.away = n in there
            env[v.name] = held

    def _splits(self, op: Operator) -> bool:
        """Whether anything inside the regions of ``op`` is split, so that there may be collectives."""
        return splits_inside(self.sharded.operands, self.sharded.results, f"{self.prefix}{op.id}/", op)

    def _scan(self, bound: Bound, graph: Graph, op: Operator, env: Env) -> None:
        arrays, layouts = self._enter(graph, op, env)
        scan = Scan.of(op)
        away = taken_in_slices(env, op, layouts)
        there = self.sharded.host_results.get(self.prefix + op.id, ())
        consts, initial, stacks = scan.split(arrays)
        constant, carried, stacked = scan.split(layouts)
        inner = [*constant, *carried, *(k.slice() for k in stacked)]
        results = self.sharded.results[self.prefix + op.id]
        _, stacked_layouts = scan.split_results(results)
        wanted = [*carried, *(k.slice() for k in stacked_layouts)]
        length = scan.length
        if any(k.dims[0] for k in stacked):  # a microbatch goes over its own examples, with sums of its own
            length = stacks[0].shape[0]
            inner = [Layout.replicated(len(k.dims)) for k in inner]
            wanted = [Layout.replicated(len(k.dims)) for k in wanted]
        region = bound.regions["body"]

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            here = [to_device(x) if n in away else x for n, x in enumerate(xs, scan.num_whole)]
            here = converted_inside(here, scan) if self.sharded.memory_bound else here
            out = self.inside(op, "body").run(region, [*consts, *carry, *here], inner, wanted)
            typed = [_typed(a, o.type) for a, o in zip(out, region.graph.outputs, strict=True)]
            return scan.split_results([to_host(a) if n in there else a for n, a in enumerate(typed)])

        reverse, unroll = bool(bound.params["reverse"]), bound.params.get("unroll", 1)
        pairs = numbers_in_place(graph, op, layouts, results, away)
        if not self.prefix and self.sharded.memory_bound and self.phase == "backward":
            initial = done_before(graph, env, initial)
        on_cpu, loop = self.sharded.orders_collectives, {"length": length, "reverse": reverse, "unroll": unroll}
        carry, ys = scan_in_place(body, initial, stacks, pairs, drops_barriers=on_cpu, **loop)
        self._leave(op, env, [*carry, *ys])

    def _while(self, bound: Bound, graph: Graph, op: Operator, env: Env) -> None:
        arrays, layouts = self._enter(graph, op, env)
        loop = While.of(op)
        in_cond, in_body, initial = loop.split(arrays)
        layouts_in_cond, layouts_in_body, carried = loop.split(layouts)
        predicate = bound.regions["cond"].graph.outputs[0].type

        def goes_on(carry: Sequence[Any]) -> Any:
            out = self.inside(op, "cond").run(
                bound.regions["cond"],
                [*in_cond, *carry],
                [*layouts_in_cond, *carried],
                [Layout.replicated(predicate.rank)],
            )
            return jnp.asarray(out[0])

        def body(carry: Sequence[Any]) -> list[Any]:
            region = bound.regions["body"]
            out = self.inside(op, "body").run(region, [*in_body, *carry], [*layouts_in_body, *carried], carried)
            return [_typed(a, o.type) for a, o in zip(out, region.graph.outputs, strict=True)]

        self._leave(op, env, while_loop(goes_on, body, initial, predicate.rank))

    def _cond(self, bound: Bound, graph: Graph, op: Operator, env: Env) -> None:
        arrays, layouts = self._enter(graph, op, env)
        results = self.sharded.results[self.prefix + op.id]

        def branch(name: str) -> Any:
            region = bound.regions[name]

            def run(*operands: Any) -> list[Any]:
                out = self.inside(op, name).run(region, operands, layouts[1:], results)
                return [_typed(a, o.type) for a, o in zip(out, region.graph.outputs, strict=True)]

            return run

        branches = [branch(name) for name, _ in op.regions]
        self._leave(op, env, switched(arrays[0], branches, arrays[1:], bound.params.get("branches_platforms")))


def _age(env: Env, op: Operator) -> int:
    """Number of the last region that an operand of ``op`` depends on."""
    sources = (env.get(o) for o in op.reads)
    return max((s.age for s in sources if isinstance(s, Held)), default=0)


def _typed(array: Any, type: TensorType) -> Any:
    """Numpy scalars of literals as jax arrays; a loop's carry has to be one."""
    return jnp.asarray(array) if isinstance(array, np.ndarray | np.generic) else array


def done_before(graph: Graph, env: Mapping[str, Held | ComputedValue], carries: Sequence[Any]) -> list[Any]:
    """Operands of a loop that wait for some results of the step.

    Where memory is short the loss is summed, and a parameter after the last layer updated, before the loop, as the
    plan has it. XLA's scheduler for GPUs would put that after the loop, with logits and their gradient in memory.

    Args:
        graph: the step.
        env: its values so far.
        carries: what the loop begins with.
    """
    names = dict.fromkeys(o.operand for o in graph.outputs if isinstance(o.operand, str))
    inputs = {i.name for i in graph.inputs}
    values = [(n, env[n]) for n in names if n in env and n not in inputs]
    held = [v for _, v in values if isinstance(v, Held) and ("", v.layout) in v.arrays and not v.away]
    if not held or not carries:
        return list(carries)
    after, results = lax.optimization_barrier((list(carries), [v.arrays["", v.layout] for v in held]))
    for v, array in zip(held, results, strict=True):
        v.arrays["", v.layout] = array
    return list(after)
