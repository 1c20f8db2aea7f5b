"""`Compiled`: a planned, lowered and compiled function for one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.api.mutable import split_mutable
from autopar.api.user_mesh import concrete, on_mesh, outside, relabelled
from autopar.errors import AutoparError
from autopar.frontend import CallSignature, SignatureOptions, Traced
from autopar.plan import Plan
from autopar.runtime.loaded import LoadedProgram


@dataclass(frozen=True, eq=False)
class Compiled:
    """What `ParallelFunction.compile` returns; call it with arguments of the signature it was made for.

    Args:
        plan: what runs.
        traced: the function's graph.
        local: the compiled program.
        function: the user's function.
        signature_options: how its arguments are read.
        resolve: (args, kwargs) -> signature and traced leaves.
    """

    plan: Plan
    traced: Traced
    local: LoadedProgram
    function: Any
    signature_options: SignatureOptions
    resolve: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[CallSignature, list[Any]]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step. Raises AutoparError for arguments of other shapes, dtypes or structure."""
        args, kwargs, mutable = split_mutable(args, kwargs)
        signature, leaves = self.resolve(args, kwargs)
        if signature != self.traced.signature:
            raise AutoparError(
                f"{self.traced.graph.name} was compiled for other arguments",
                cause="shapes, dtypes, structure or static values differ",
                remedy="call the decorated function itself, which compiles once for each signature",
            )
        return mutable.joined(self.run(leaves))

    def run(self, leaves: list[Any]) -> Any:
        """Runs a step on the traced leaves of a call."""
        with self._outside():
            placed = self.local.place_all(leaves)
        return self.run_placed(placed, leaves)

    def run_placed(self, placed: list[Any], leaves: list[Any]) -> Any:
        """Runs a step on leaves that lie as the plan wants; ``leaves`` are those that the caller gave."""
        if self.traced.signature.mesh is None:
            return self.traced.results(self.local.run(placed, leaves), leaves)
        with outside():
            arrays = self.local.run(placed, leaves)
        return self.traced.results(list(map(relabelled, arrays, self._on_user_mesh)), leaves)

    def _outside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.traced.signature.mesh is None else outside()

    @cached_property
    def _on_user_mesh(self) -> Sequence[NamedSharding | None]:
        """Shardings of the results on the mesh that is around the calls; None where it cannot say them."""
        program, outputs = self.local.program, self.traced.graph.outputs
        mesh = concrete(self.traced.signature.mesh, jax.devices()) if self.local.here else None
        if mesh is None:
            return [None] * len(outputs)
        return [on_mesh(s, o.type.rank, mesh) for s, o in zip(program.output_shardings, outputs, strict=True)]

    def repeated(self, leaves: list[Any]) -> list[Any] | None:
        """The traced ones of all leaves of a call of the same structure; None where a static one is another object."""
        if not self._statics:
            return leaves
        if any(leaves[i] is not value for i, value in self._statics):
            return None
        return [leaves[i] for i in self.traced.signature.traced]

    @cached_property
    def _statics(self) -> tuple[tuple[int, Any], ...]:
        entries, traced = self.traced.signature.entries, set(self.traced.signature.traced)
        return tuple((i, entry.value) for i, entry in enumerate(entries) if i not in traced)

    @property
    def input_shardings(self) -> Any:
        """``(args, kwargs)`` with a `NamedSharding` for each array; by path where a container refuses them."""
        shardings = self.local.program.input_shardings
        try:
            return self.traced.signature.arguments(shardings)
        except Exception:
            return {path: s for (path, _, _), s in zip(self.traced.arguments, shardings, strict=False)}

    @property
    def output_shardings(self) -> Any:
        """A pytree like the result with a `NamedSharding` for each array."""
        return self.traced.results(self.local.program.output_shardings)

    def cost_analysis(self) -> Any:
        """jax's cost statistics of the program; for several stages a dict by program.

        Raises:
            AutoparError: the programs are on workers, which do not send them.
        """
        return self.local.executable.cost_analysis()

    def as_text(self) -> str:
        """Optimized HLO of the stage program."""
        return str(self.local.executable.as_text())

    def memory_analysis(self) -> Any:
        """jax's memory statistics of the stage program (bytes a device)."""
        return self.local.executable.memory_analysis()
