"""Values while a program is traced on one device's pieces: the layouts in which each exists so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir import Layout, TensorType
from autopar.lower.reshard import apply_steps
from autopar.sharding.reshard import PathTables
from autopar.sharding.routes import Routes


@dataclass
class Held:
    """A value with a layout that the plan gave it.

    Args:
        routes: says from which copy a reader takes it.
        arrays: local pieces by (phase, layout).
    """

    routes: Routes
    arrays: dict[tuple[str, Layout], Any]

    @staticmethod
    def of(tables: PathTables, type: TensorType, layout: Layout, array: Any, copies: dict[str, Layout]) -> Held:
        """The value ``array``, made in ``layout``."""
        return Held(Routes(tables, type, layout, copies), {("", layout): array})

    @property
    def type(self) -> TensorType:
        """Type of the whole value."""
        return self.routes.type

    @property
    def made(self) -> Layout:
        """The layout that it was made in."""
        return self.routes.made

    def take(self, required: Layout, phase: str) -> Any:
        """The local piece in ``required``, resharded if need be."""
        for source, target in self.routes.take(required, phase):
            steps = self.routes.tables.path(self.type, source[1], target[1])
            self.arrays[target] = apply_steps(steps, self.arrays[source], self.routes.tables.mesh)
        return self.arrays[self.routes.place(required, phase)]


@dataclass
class Made:
    """A value that holds no data: made on each device in whatever layout a reader asks for."""

    type: TensorType
    make: Callable[[Layout], Any]
    arrays: dict[Layout, Any] = field(default_factory=dict)

    def take(self, required: Layout, phase: str) -> Any:
        """The local piece in ``required``; of a partial sum one device of each group holds it, the others zeros."""
        if required not in self.arrays:
            whole = self.make(Layout(required.dims))
            if required.partial and required.reduce == "sum":
                whole = jnp.where(lax.axis_index(required.partial) == 0, whole, jnp.zeros_like(whole))
            self.arrays[required] = whole
        return self.arrays[required]
