"""`Step`: a program with the abstract values of its inputs, as passes from step to step take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph


@dataclass(frozen=True, eq=False)
class Step:
    """A train step as flat arrays in and out.

    Args:
        program: its graph with what running it needs.
        avals: shape and dtype of each input, as jax knows them.
    """

    program: BoundGraph
    avals: tuple[Any, ...]

    @property
    def graph(self) -> Graph:
        """The graph, without jax."""
        return self.program.graph


def step_of(traced: Traced) -> Step:
    """The step of a traced function; what it closes over are inputs behind the others."""
    return Step(traced.program, (*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)))
