"""`Case`: one train step made of code that other people released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

Step: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A step and how it is compared.

    Args:
        family: module of this package that builds it.
        name: function of that module that returns ``(step, args)``. A step takes ``(state, *batch)`` and
            returns ``(state, metrics)``, or changes ``state`` in place and returns metrics.
        distribution: name of the released package that the step comes from.
        version: the version that the result in ``docs/public-steps.md`` is of.
        what: what is in it, for the list.
        single: whether it is compared in float32 since the package's code names that type.
        mutates: whether the step changes its first argument in place.
        jit: what compiles the plain step: "jax.jit", "flax.nnx.jit" or "equinox.filter_jit".
        batch: positions of the arguments that "by hand" splits over their leading dim.
        split: whether the plan is expected to split some operator.
        options: of `autopar.parallelize`, as pairs.
        fails: why the case does not hold today; empty if it does.
    """

    family: str
    name: str
    distribution: str
    version: str
    what: str
    single: bool = False
    mutates: bool = False
    jit: str = "jax.jit"
    batch: Sequence[int] = (1,)
    split: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    fails: str = ""

    @property
    def id(self) -> str:
        """Name in reports."""
        return f"{self.family}-{self.name}"

    def build(self) -> tuple[Step, Arguments]:
        """The step and its first arguments.

        Raises:
            ModuleNotFoundError: a package that the family needs is not installed.
        """
        built: tuple[Step, Arguments] = getattr(import_module(f"tests.public.{self.family}"), self.name)()
        return built
