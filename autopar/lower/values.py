"""Values while a program is traced on one device's pieces: the layouts in which each exists so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir import Layout, Operator, TensorType
from autopar.ir.loops import Scan
from autopar.lower.collective_barriers import CollectiveBarriers
from autopar.lower.hosted import to_device, to_host
from autopar.lower.localize.base import AxisIndex
from autopar.lower.not_before import not_before
from autopar.lower.reshard import apply_steps
from autopar.sharding.routes import Routes

#: Steps of resharding that send nothing.
_LOCAL = ("slice", "mask")


@dataclass
class Held:
    """A value with a layout that the plan gave it.

    Args:
        routes: says from which copy a reader takes it.
        arrays: local pieces by (phase, layout).
        index: which piece this is.
        barriers: of the graph that it is in; None where collectives may run as they like.
        age: number of the last region of ``barriers`` that it depends on.
        away: whether the value as made is in host memory still.
        there: pieces of it in host memory, by layout.
    """

    routes: Routes
    arrays: dict[tuple[str, Layout], Any]
    index: AxisIndex = lax.axis_index
    barriers: CollectiveBarriers | None = None
    age: int = 0
    away: bool = False
    there: dict[Layout, Any] = field(default_factory=dict)

    @property
    def type(self) -> TensorType:
        """Type of the whole value."""
        return self.routes.type

    @property
    def layout(self) -> Layout:
        """The layout that it was made in."""
        return self.routes.layout

    def stays_away(self, required: Layout) -> bool:
        """Whether a reader of the layout ``required`` can take the value from host memory."""
        return self.away and required == self.layout

    def as_it_lies(self) -> Any:
        """The value as it was made, in host memory where it is there."""
        return self.arrays["", self.layout]

    def take_there(self, required: Layout, phase: str) -> Any:
        """The local piece in ``required``, in host memory; it is resharded on the devices if need be."""
        if self.stays_away(required):
            return self.as_it_lies()
        if required not in self.there:
            self.there[required] = to_host(self.take(required, phase))
        return self.there[required]

    def take(self, required: Layout, phase: str, now: Any = None) -> Any:
        """The local piece in ``required``, resharded if need be.

        Args:
            required: layout that is wanted.
            phase: of the reader.
            now: a piece of another value that the reader takes, if there is one: where memory is short a copy is
                not made before it is there.
        """
        if self.away:
            self.away = False
            self.there[self.layout] = self.arrays["", self.layout]
            self.arrays["", self.layout] = to_device(self.arrays["", self.layout])
        for source, target in self.routes.take(required, phase):
            steps = self.routes.tables.path(self.type, source[1], target[1])
            piece = self.arrays[source]
            if self.routes.memory_bound and source == ("", self.layout):
                piece = not_before(piece, now)
            sends = self.barriers is not None and any(s.kind not in _LOCAL for s in steps)
            if self.barriers is not None and sends:
                piece = self.barriers.collective(piece, self.age)
            resharded = apply_steps(steps, piece, self.routes.tables.mesh, self.index)
            if self.barriers is not None and sends:
                self.barriers.collected(resharded)
            self.arrays[target] = resharded
        return self.arrays[self.routes.place(required, phase)]


@dataclass
class ComputedValue:
    """A value that holds no data: made on each device in whatever layout a reader asks for."""

    type: TensorType
    make: Callable[[Layout], Any]
    index: AxisIndex = lax.axis_index
    arrays: dict[Layout, Any] = field(default_factory=dict)

    def take(self, required: Layout, phase: str, now: Any = None) -> Any:
        """The local piece in ``required``; of a partial sum one device of each group holds it, the others zeros."""
        if required not in self.arrays:
            whole = self.make(Layout(required.dims))
            if required.partial and required.reduce == "sum":
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
        if n >= first and isinstance(source, Held) and source.stays_away(layout):
            away[n] = source
    return away
