"""Values while a program is traced on one device's pieces: the layouts in which each exists so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax

from autopar.ir import Graph, Layout, Operator, TensorType
from autopar.ir.layer_loops import of_segments
from autopar.ir.loops import Scan
from autopar.ir.primitives import PASSED_ON
from autopar.lower.barriers import CollectiveBarriers, not_before
from autopar.lower.hosted import to_device, to_host
from autopar.lower.localize.base import AxisIndex
from autopar.lower.reshard import apply_steps
from autopar.sharding.reshard import ReshardStep
from autopar.sharding.routes import Routes

#: Does a step with a shard, next to the product that takes it; None where it has no form for that.
Instead: TypeAlias = Callable[[ReshardStep, Any], Any]
#: Steps of resharding that send nothing.
_LOCAL = ("slice", "mask")


@dataclass
class Unmade:
    """A product that is made when it is first read.

    Args:
        whole: makes the terms of this device.
        scattered: makes its block of the sum that a step would scatter; None where it has no form for that.
    """

    whole: Callable[[], Any]
    scattered: Callable[[ReshardStep], Any]


@dataclass
class Held:
    """A value of the traced program, with its shards in all layouts that it has been converted to so far.

    Args:
        routes: says from which copy a reader takes it.
        arrays: local shards by (phase, layout).
        index: which shard this is.
        barriers: of the graph that it is in; None where collectives may run as they like.
        age: number of the last region of ``barriers`` that it depends on.
        away: whether the value is still in host memory, where it was made.
        on_host: shards of it in host memory, by layout.
        unmade: a product that is not computed yet: where a reduce-scatter reads it, it runs as a collective matmul.
    """

    routes: Routes
    arrays: dict[tuple[str, Layout], Any]
    index: AxisIndex = lax.axis_index
    barriers: CollectiveBarriers | None = None
    age: int = 0
    away: bool = False
    on_host: dict[Layout, Any] = field(default_factory=dict)
    unmade: Unmade | None = None

    @property
    def type(self) -> TensorType:
        """Type of the whole value."""
        return self.routes.type

    @property
    def layout(self) -> Layout:
        """The layout that it was made in."""
        return self.routes.layout

    def stays_on_host(self, required: Layout) -> bool:
        """Whether a reader of the layout ``required`` can take the value from host memory."""
        return self.away and required == self.layout

    def as_stored(self) -> Any:
        """The value as it was made, in host memory where it is there."""
        return self._made(("", self.layout))

    def _made(self, place: tuple[str, Layout]) -> Any:
        """The shard at a place; a product that is not made yet is made as it is."""
        if place not in self.arrays and self.unmade is not None:
            self.arrays[place] = self.unmade.whole()
        return self.arrays[place]

    def take_on_host(self, required: Layout, phase: str) -> Any:
        """The local shard in host memory, in the layout ``required``; devices reshard it first if need be.

        Args:
            required: layout that the reader wants.
            phase: part of the step that the reader is in, as "forward".
        """
        if self.stays_on_host(required):
            return self.as_stored()
        if required not in self.on_host:
            self.on_host[required] = to_host(self.take(required, phase))
        return self.on_host[required]

    def take(self, required: Layout, phase: str, now: Any = None, instead: Instead | None = None) -> Any:
        """The local shard in ``required``, resharded if need be.

        Args:
            required: layout that is wanted.
            phase: of the reader.
            now: a shard of another value that the reader takes, if there is one: where memory is short a copy is not
                made before it is there.
            instead: takes a shard, and the only step of its last conversion, and does it; None where it does not.
        """
        if self.away:
            self.away = False
            self.on_host[self.layout] = self.arrays["", self.layout]
            self.arrays["", self.layout] = to_device(self.arrays["", self.layout])
        place = self.routes.place(required, phase)
        for source, target in self.routes.take(required, phase):
            steps = self.routes.tables.path(self.type, source[1], target[1])
            resharded = None
            if len(steps) == 1 and self.unmade is not None and source not in self.arrays:
                resharded = self.unmade.scattered(steps[0])
            if resharded is None:
                piece = self._made(source)
                if self.routes.memory_bound and source == ("", self.layout):
                    piece = not_before(piece, now)
                if len(steps) == 1 and instead is not None and target == place:
                    resharded = instead(steps[0], piece)
                if resharded is None:
                    resharded = self._resharded(steps, piece)
            self.arrays[target] = resharded
        return self._made(place)

    def _resharded(self, steps: Sequence[ReshardStep], piece: Any) -> Any:
        """The shard after steps, in the order with regions that the program around needs."""
        if self.barriers is None or all(s.kind in _LOCAL for s in steps):
            return apply_steps(steps, piece, self.routes.tables.mesh, self.index)
        piece = self.barriers.collective(piece, self.age)
        resharded = apply_steps(steps, piece, self.routes.tables.mesh, self.index)
        self.barriers.collected(resharded)
        return resharded


@dataclass
class ComputedValue:
    """A value that holds no data: made on each device in whatever layout a reader asks for."""

    type: TensorType
    make: Callable[[Layout], Any]
    index: AxisIndex = lax.axis_index
    zero: bool = False
    arrays: dict[Layout, Any] = field(default_factory=dict)

    def take(self, required: Layout, phase: str, now: Any = None) -> Any:
        """The local shard in ``required``; of a partial sum one device of each group holds it, the others zeros."""
        if required not in self.arrays:
            whole = self.make(Layout(required.dims))
            if required.partial and required.reduce == "sum" and not self.zero:  # zeros are a term of their sum
                whole = jnp.where(self.index(required.partial) == 0, whole, jnp.zeros_like(whole))
            self.arrays[required] = whole
        return self.arrays[required]


def taken_in_slices(
    env: Mapping[str, Held | ComputedValue], op: Operator, layouts: Sequence[Layout]
) -> dict[int, Held]:
    """Stacks in host memory that a loop takes in slices, by the number of the operand.

    Args:
        env: values by name.
        op: an operator with regions.
        layouts: those in which it takes its operands.
    """
    away: dict[int, Held] = {}
    first = Scan.of(op).num_whole if op.primitive == "scan" else len(op.operands)
    for n, (operand, layout) in enumerate(zip(op.operands, layouts, strict=True)):
        source = env.get(operand) if isinstance(operand, str) else None
        if n >= first and isinstance(source, Held) and source.stays_on_host(layout):
            away[n] = source
    return away


def converted_inside(slices: Sequence[Any], scan: Scan) -> list[Any]:
    """Slices of a loop's stacks, with raw bits for the float32 slices that the body converts to bfloat16.

    XLA's compiler for TPUs moves such a conversion through barriers and loops: it would convert the whole stack before
    the loop, and keep both. It leaves integers alone.

    Args:
        slices: one a stack.
        scan: the loop.
    """
    entries = scan.split(scan.body.inputs)[2]
    converted = _converted(scan.body, [e.name for e in entries])
    pairs = zip(entries, slices, strict=True)
    return [_as_bits(x) if e.name in converted and x.dtype == jnp.float32 else x for e, x in pairs]


def rows_as_bits(graph: Graph, op: Operator, rows: Sequence[Any]) -> Sequence[Any]:
    """``rows``, as raw bits where a loop over segments reads them from a float32 stack and converts them to bfloat16.

    XLA's compiler for TPUs would else convert the whole stack before the loop, and keep both.

    Args:
        graph: body of the loop.
        op: an operator of the body.
        rows: results of the operator.
    """
    if op.primitive != "gather" or not of_segments(op) or rows[0].dtype != jnp.float32:
        return rows
    (row,) = op.results
    return [_as_bits(rows[0])] if _converted(graph, [row.name]) else rows


def _converted(graph: Graph, names: Sequence[str]) -> set[str]:
    """The subset of some values that operators of a graph convert to bfloat16."""
    sources, converted = dict(zip(names, names, strict=True)), set[str]()
    for op in graph.operators:
        for n, operand in enumerate(op.operands):
            if operand in sources and op.primitive in PASSED_ON:
                sources[op.results[n].name] = sources[operand]
            elif operand in sources and op.primitive == "convert_element_type" and op.results[0].type.dtype == "bf16":
                converted.add(sources[operand])
    return converted


def _as_bits(array: Any) -> Any:
    bits = lax.optimization_barrier(lax.bitcast_convert_type(array, jnp.uint32))
    return lax.bitcast_convert_type(bits, array.dtype)
