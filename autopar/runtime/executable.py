"""Callables that run compiled programs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar._compat.dtypes import SUB_BYTE


@dataclass(frozen=True, eq=False)
class Jitted:
    """A program that jax's jitted function runs, not its compiled object.

    Args:
        function: jitted.
        compiled: what `jax.stages.Lowered.compile` made of it.
    """

    function: Any
    compiled: Any

    def __call__(self, *arrays: Any) -> Any:
        """Runs the program."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.function(*arrays)

    def as_text(self) -> str:
        """Optimized HLO of the program."""
        return str(self.compiled.as_text())

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results."""
        return self.compiled.out_info

    def memory_analysis(self) -> Any:
        """jax's memory statistics."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """jax's cost statistics."""
        return self.compiled.cost_analysis()


def runnable(function: Any, compiled: Any, dtypes: Sequence[Any]) -> Any:
    """The callable of a program: ``compiled``, or ``function`` where jax's compiled object refuses its own inputs.

    jax's compiled objects take no arrays of a dtype smaller than a byte: they compare the packed layout of the
    compiler with the layout of the array, which does not say how it is packed.

    Args:
        function: jitted.
        compiled: jax's compiled object.
        dtypes: of the program's inputs.
    """
    packed = any(getattr(d, "name", "") in SUB_BYTE for d in dtypes)
    return Jitted(function, compiled) if packed else compiled
