"""`Microbatching`: which operators run once a microbatch, and how results of microbatches are joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cluster.mesh import Link, LogicalMesh
from autopar.ir import Layout

#: The axis of time that microbatches split. No mesh axis has this name.
AXIS = "microbatch"


@dataclass(frozen=True)
class Joined:
    """A value that leaves the loop over microbatches.

    Args:
        name: the value.
        layout: its state in the loop. Partial over `AXIS`: microbatches are reduced by ``layout.reduce``. Split: pieces
            are concatenated along that dim.
    """

    name: str
    layout: Layout


@dataclass(frozen=True)
class Microbatching:
    """A graph cut in three: operators before, in and after the loop over microbatches.

    Args:
        count: number of microbatches.
        batch: inputs that are split, with the dim; microbatch k is the k-th of ``count`` equal consecutive pieces.
        operands: for each operator of the loop (ids of enclosing operators and regions before it, as in a plan)
            the layout over `AXIS` in which each operand is used; None for literals.
        results: likewise the layouts of its results.
        before: ids of operators that run once, on whole values, before the loop, in running order.
        body: ids of operators of the loop, in running order.
        after: ids of operators that run once after it.
        joined: values that leave the loop.
        body_inputs: values from outside that the loop takes: inputs of the graph and results of ``before``.
        between: ids of those of ``after`` that run once all forward passes are done, before any backward pass: where
            examples meet. Empty where they do not.
        met: results of ``between`` that the loop takes, in its backward pass.
    """

    count: int
    batch: Mapping[str, int]
    operands: Mapping[str, tuple[Layout | None, ...]]
    results: Mapping[str, tuple[Layout, ...]]
    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]
    joined: tuple[Joined, ...]
    body_inputs: tuple[str, ...]
    between: tuple[str, ...] = ()
    met: tuple[str, ...] = ()


def pseudo_mesh(count: int) -> LogicalMesh:
    """A mesh of one axis whose positions are the microbatches, over which nothing can be sent."""
    return LogicalMesh(((AXIS, count),), (Link(1.0, 1e9),))


def split(rank: int, dim: int) -> Layout:
    """Layout of a value of ``rank`` dims that microbatches split along ``dim``."""
    return Layout(tuple((AXIS,) if d == dim else () for d in range(rank)))
