"""`PlannedTechnique`: the interface of a technique on the planner's side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.ir import Graph
from autopar.ir.phases import is_stage_loop
from autopar.plan import Stage
from autopar.search.problem import Problem


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Asked:
    """A step, or a stage of a pipeline, of which the search asks what it may take.

    Args:
        problem: its graph is that without the technique; its job, request and cluster are what is asked for.
        planned: the plan without the technique; None before there is one.
        named: whether a strategy names the plan, and what it recomputes.
        updates_by_layer: whether the update of its stacks may run a layer at a time.
        updates_in_backward: whether it may run inside of its backward loop.
        in_flight: most microbatches in flight, of a stage.
    """

    problem: Problem
    planned: Stage | None = None
    named: bool = False
    updates_by_layer: Callable[[], bool] = _never
    updates_in_backward: Callable[[], bool] = _never
    in_flight: int = 1

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage of a pipeline."""
        return any(map(is_stage_loop, self.problem.graph.operators))


class PlannedTechnique(Protocol):
    """A technique on the planner's side."""

    @property
    def field(self) -> str:
        """The field of `StepForm` that has its value."""

    def obstacle(self, asked: Asked) -> str:
        """Reason for which it is not tried; "" where `options` has values."""

    def options(self, asked: Asked) -> tuple[Any, ...]:
        """Values of the field that are worth a try, the best first; empty where there is an obstacle."""

    def notes(self, graph: Graph, value: Any) -> tuple[str, ...]:
        """Notes of a plan with a value.

        Args:
            graph: without the technique.
            value: of the field.
        """


@dataclass(frozen=True)
class Switch(ABC):
    """A `PlannedTechnique` that a form has or has not, and of which plans say no more than its name.

    Args:
        field: see `PlannedTechnique`.
    """

    field: str

    @abstractmethod
    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""

    def options(self, asked: Asked) -> tuple[bool, ...]:
        """See `PlannedTechnique`."""
        return () if self.obstacle(asked) else (True,)

    def notes(self, graph: Graph, value: bool) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return ()


def body_of(graph: Graph) -> Graph:
    """Graph of one microbatch of a stage of a pipeline; other graphs themselves."""
    return next((op.region("body") for op in graph.operators if is_stage_loop(op)), graph)
