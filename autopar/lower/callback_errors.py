"""Exceptions of Python code that a program calls, kept until the step is over.

An exception that left a callback would end its device's program, and the others would wait for it in their next
collective until XLA ends the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@dataclass(eq=False)
class CallbackErrors:
    """What the callbacks of one program have raised since it was last asked.

    Args:
        raised: the exceptions, the first first.
        guards: whether the program has callbacks whose exceptions are kept.
    """

    raised: list[BaseException] = field(default_factory=list)
    guards: bool = False

    def guarded(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parameters of a callback's primitive with a callback that returns zeros in place of an exception."""
        callback: Callable[..., Any] | None = params.get("callback")
        if callback is None:
            return params
        self.guards = True
        avals = params.get("result_avals", ())

        def guard(*arrays: Any) -> Any:
            try:
                return callback(*arrays)
            except BaseException as error:
                self.raised.append(error)
                return [np.zeros(a.shape, a.dtype) for a in avals]

        return {**params, "callback": guard}

    def check(self, results: Any) -> None:
        """Waits for a step and raises what a callback has raised, as jax does: JaxRuntimeError with its text.

        Args:
            results: of the step.
        """
        jax.block_until_ready(results)
        jax.effects_barrier()
        if self.raised:
            first = self.raised[0]
            self.raised.clear()
            text = "".join(traceback.format_exception(first))
            raise jax.errors.JaxRuntimeError(f"INTERNAL: a callback raised {type(first).__name__}: {text}") from first
