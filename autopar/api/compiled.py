"""`Compiled`: a planned, lowered and compiled function for one signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.frontend import SignatureOptions, Traced, flatten_call
from autopar.plan import Plan
from autopar.runtime import LocalProgram


@dataclass(frozen=True, eq=False)
class Compiled:
    """What `ParallelFunction.compile` returns; call it with arguments of the signature it was made for."""

    plan: Plan
    traced: Traced
    local: LocalProgram
    function: Any
    signature_options: SignatureOptions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step. Raises AutoparError for arguments of other shapes, dtypes or structure."""
        signature, leaves = flatten_call(self.function, args, kwargs, self.signature_options)
        if signature != self.traced.signature:
            raise AutoparError(
                f"{self.traced.graph.name} was compiled for other arguments",
                cause="shapes, dtypes, structure or static values differ",
                remedy="call the decorated function itself, which compiles once for each signature",
            )
        return self.run(leaves)

    def run(self, leaves: list[Any]) -> Any:
        """Runs a step on the traced leaves of a call."""
        return self.traced.results(self.local(leaves))

    @property
    def input_shardings(self) -> Any:
        """Pytree of `NamedSharding` like ``(args, kwargs)``."""
        shardings = self.local.program.input_shardings
        args, kwargs = self.traced.signature.arguments(shardings)
        return args, kwargs

    def as_text(self) -> str:
        """Optimized HLO of the stage program."""
        return str(self.local.executable.as_text())

    def memory_analysis(self) -> Any:
        """jax's memory statistics of the stage program (bytes a device)."""
        return self.local.executable.memory_analysis()

    def place(self, leaves: list[Any]) -> list[Any]:
        """The traced leaves of a call, placed as the plan wants them."""
        shardings = self.local.program.input_shardings
        return [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=False)]
