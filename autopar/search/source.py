"""What the search of pipelines asks of the function that is planned; lowering answers, since it can trace again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.ir import Graph
from autopar.microbatch import Microbatching
from autopar.recompute import Level
from autopar.stages import StageMap, StageParts


@dataclass(frozen=True)
class Sliced:
    """A step cut into stages.

    Args:
        map: stages of all operators.
        parts: what each stage takes, computes and gives.
        graphs: each stage as a graph of its own; they may be made when they are first asked for.
        origins: by stage, for operators of its graph (with the ids of the loop before those of the loop's body) the id
            of the operator of the step.
        alike: for each stage the first whose graph is the same but for the names of inputs and outputs; empty where
            that is not known.
    """

    map: StageMap
    parts: tuple[StageParts, ...]
    graphs: Sequence[Graph]
    origins: Sequence[Mapping[str, str]]
    alike: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recomputation:
    """What the backward pass of a stage computes anew.

    Args:
        level: what is held.
        layers: ids of the operators of each layer of the stage's forward pass.
    """

    level: Level
    layers: tuple[tuple[str, ...], ...]


class StageSource(Protocol):
    """A traced step that can be cut."""

    def microbatches(self, count: int) -> Microbatching:
        """The step in ``count`` microbatches. Raises MicrobatchError where that cannot be."""
        ...

    def slice(self, count: int, members: Sequence[Sequence[str]]) -> Sliced:
        """The step in ``count`` microbatches and one stage for each entry of ``members``.

        Args:
            count: number of microbatches.
            members: by stage the ids of its operators of the forward pass.
        """
        ...

    def piece(self, count: int, members: Sequence[Sequence[str]], stage: int) -> Sliced:
        """One stage of `slice`, with the map of all of them."""
        ...

    def recomputed(self, count: int, members: Sequence[Sequence[str]], stage: int, again: Recomputation) -> Graph:
        """The graph of one stage of `slice` with a backward pass that computes anew what ``again`` does not hold."""
        ...
