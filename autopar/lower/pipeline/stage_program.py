"""`StageProgram`: one program of a stage, for any mesh of its shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.lower.localize.base import AxisIndex
from autopar.lower.pipeline.ports import Port
from autopar.schedule import Work


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program of a stage, for any mesh of its shape.

    Args:
        work: what it is.
        reads: its arguments.
        writes: its results.
        accumulates: further results: what this microbatch contributes, with how contributions are joined.
        on_device: (number of the microbatch, local pieces of ``reads``, which piece the device's is) -> local pieces of
            the results.
        compiler_options: what XLA is told.
    """

    work: Work
    reads: tuple[Port, ...]
    writes: tuple[Port, ...]
    accumulates: tuple[tuple[Port, str], ...]
    on_device: Callable[[Any, Sequence[Any], AxisIndex], list[Any]]
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[Port, ...]:
        """All that it returns, in order."""
        return (*self.writes, *(p for p, _ in self.accumulates))

    def jitted(self, mesh: Mesh, donated: Sequence[int] = ()) -> Any:
        """The program on a mesh: takes the microbatch's number and the arrays of ``reads``, returns a tuple.

        Args:
            mesh: the devices.
            donated: indices of the ``reads`` whose buffers it may write results into.
        """

        def body(number: Any, *arrays: Any) -> tuple[Any, ...]:
            microbatch_inputs = [p.enter(a) for p, a in zip(self.reads, arrays, strict=True)]
            outputs = self.on_device(number, microbatch_inputs, jax.lax.axis_index)
            return tuple(p.leave(_array(m)) for p, m in zip(self.results, outputs, strict=True))

        body.__name__ = str(self.work).replace(" ", "_")
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(jax.sharding.PartitionSpec(), *(p.spec for p in self.reads)),
            out_specs=tuple(p.spec for p in self.results),
            check_vma=False,
        )
        return jax.jit(
            mapped,
            in_shardings=(
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
                *(p.sharding(mesh) for p in self.reads),
            ),
            out_shardings=tuple(p.sharding(mesh) for p in self.results),
            donate_argnums=tuple(n + 1 for n in donated),
            compiler_options=dict(self.compiler_options) or None,
        )


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
