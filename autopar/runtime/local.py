"""One compiled program on this process's devices: arguments are placed, then XLA runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.lower.program import Program


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """A compiled program.

    Args:
        program: what was compiled.
        executable: jax's compiled object.
        dtypes: dtype of each input (Python numbers have none of their own).
        names: path of each input, for messages.
        constants: arrays that the function closes over, placed.
    """

    program: Program
    executable: Any
    dtypes: tuple[Any, ...]
    names: tuple[str, ...]
    constants: tuple[Any, ...]

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            leaves: the traced leaves of a call, anywhere; those of other shardings are moved.

        Raises:
            AutoparError: a leaf was donated to an earlier call.
        """
        shardings = self.program.input_shardings
        placed = [
            leaf if type(leaf) is not np.ndarray and getattr(leaf, "sharding", None) is wanted else self._place(i, leaf)
            for i, (leaf, wanted) in enumerate(zip(leaves, shardings, strict=False))
        ]
        result: Sequence[Any] = self.executable(*placed, *self.constants)
        return result

    def _place(self, index: int, leaf: Any) -> Any:
        wanted = self.program.input_shardings[index]
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise AutoparError(
                    f"{self.names[index]} was donated to an earlier call; its buffer is gone",
                    cause="donate_argnums lets a step reuse the memory of its argument",
                    remedy="use the state that the step returned, or leave donate_argnums empty",
                )
            if leaf.sharding == wanted or leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                return leaf
            return jax.device_put(leaf, wanted)
        return jax.device_put(np.asarray(leaf, self.dtypes[index]), wanted)


def load_local(traced: Traced, program: Program) -> LocalProgram:
    """Compiles a program for this process's devices and places what it closes over."""
    graph = traced.graph
    avals = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(avals, program.input_shardings, strict=True)
    ]
    executable = program.function.lower(*shapes).compile()
    count = len(avals) - len(traced.closed_over)
    constants = tuple(
        jax.device_put(c, s) for c, s in zip(traced.closed_over, program.input_shardings[count:], strict=True)
    )
    return LocalProgram(
        program, executable, tuple(a.dtype for a in avals), tuple(i.name for i in graph.inputs), constants
    )


def default_sharding(mesh: Any, shape: tuple[int, ...]) -> NamedSharding:
    """Splits the largest dim that all devices divide, so that no device holds the whole; else whole."""
    n = mesh.size
    best = max((d for d in range(len(shape)) if shape[d] % n == 0 and shape[d] > 0), key=lambda d: shape[d], default=None)
    spec = [None] * len(shape)
    if best is not None and n > 1:
        spec[best] = mesh.axis_names  # type: ignore[call-overload]
    return NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
