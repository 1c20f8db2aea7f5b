"""Questions of the search of pipelines about the planned function; lowering answers, since it can trace again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.ir import Graph
from autopar.microbatch import Microbatching
from autopar.plan import Plan, StepForm
from autopar.search.constraints import Constraint, SharedStages
from autopar.solver.meter import Meter
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
        isomorphic: for each stage the first whose graph is the same but for the names of inputs and outputs;
            empty where that is not known.
    """

    map: StageMap
    parts: tuple[StageParts, ...]
    graphs: Sequence[Graph]
    origins: Sequence[Mapping[str, str]]
    isomorphic: tuple[int, ...] = ()

    def arriving(self, stage: int) -> frozenset[str]:
        """Names of the inputs of a stage's graph that other stages send once for every microbatch.

        Args:
            stage: index of ``parts``.
        """
        return frozenset(str(v) for v in self.parts[stage].graph_inputs if v.of_microbatch)

    def met(self, stage: int) -> frozenset[str]:
        """Paths of the outputs of a stage's graph that are computed from all microbatches, between two loops over them.

        Args:
            stage: index of ``parts``.
        """
        return frozenset(str(v) for v in self.parts[stage].graph_sends if v.kind == "met")

    def constraints(self, stage: int, asked: Sequence[Constraint]) -> tuple[Constraint, ...]:
        """Constraints on inputs of a stage's graph, by their names there.

        Args:
            stage: its place among ``parts``.
            asked: by names of the step's inputs.
        """
        by_name = {c.value: c for c in asked if c.stage in (None, stage)}
        return tuple(
            replace(by_name[v.name], value=str(v))
            for v in self.parts[stage].graph_inputs
            if v.kind in ("step", "piece") and v.name in by_name
        )


@dataclass(frozen=True)
class CutStage:
    """A stage of a step, in a form.

    Args:
        graph: of the stage.
        origins: ids of the operators of the step, by the ids of the stage's operators; see `Sliced`.
    """

    graph: Graph
    origins: Mapping[str, str]

    def origin(self, id: str) -> str:
        """Id in the step of an operator of the stage; "" of one that the step does not have."""
        known = id
        while known and known not in self.origins:
            known = known.rpartition("/")[0]
        return self.origins[known] + id.removeprefix(known) if known else ""


@dataclass(frozen=True)
class FormedStep:
    """A step as one stage, in a form.

    Args:
        graph: of the step.
        form: with the ends of the layers that were found, where something is recomputed.
    """

    graph: Graph
    form: StepForm


@dataclass(frozen=True)
class LayeredStep:
    """A step whose stacked layers are split, so that stages may be cut between them.

    Args:
        graph: of the step.
        source: cuts it.
        donated: names of its inputs whose buffers the program may reuse.
        constraints: where inputs are wanted.
        groups: of stacked layers; 1 where nothing is stacked.
        of_step: a plan of ``graph`` as one of the step itself.
        shared_stages: stages of another plan with whose state it is planned; None where it is not.
    """

    graph: Graph
    source: StageSource
    donated: frozenset[str]
    constraints: tuple[Constraint, ...]
    groups: int
    of_step: Callable[[Plan], Plan]
    shared_stages: SharedStages | None = None


class StepSource(Protocol):
    """A traced step in each of the forms that are planned."""

    @property
    def meter(self) -> Meter:
        """Counts the operators of what is traced."""

    def in_form(self, form: StepForm) -> FormedStep:
        """The step as one stage in a form. Raises MicrobatchError: there cannot be as many microbatches."""

    def may_update_by_layer(self) -> bool:
        """Whether the step has stacks of layers whose update may run a layer at a time."""

    def update_in_backward(self) -> tuple[bool, str]:
        """Whether the update of stacks of layers may run inside of the backward loop over them, in one microbatch.

        With a note on gradients for which that may not be; "" without any.
        """

    def layered(
        self, num_stages: int | None, most_groups: int, *, one_loop: bool = False, block_scores: int = 0
    ) -> LayeredStep:
        """The step with stacks split.

        Args:
            num_stages: of the pipeline; None where it is free.
            most_groups: groups of layers that a stack is split into.
            one_loop: whether each stage of a given number is to have one group, so that one loop goes over its layers.
            block_scores: scores of one head from which attention of all stages runs in blocks; 0 leaves it as it is.
        """


class StageSource(Protocol):
    """A traced step that can be cut into microbatches and pipeline stages."""

    def metered(self, meter: Meter) -> StageSource:
        """The same step, whose work another meter counts."""

    def with_stages_after(self, after: tuple[tuple[int, ...], ...]) -> StageSource:
        """The same step where stages are a graph.

        Args:
            after: by stage the earlier stages that its forward pass waits for; empty where they are a chain.
        """

    def microbatches(self, count: int) -> Microbatching:
        """The step in ``count`` microbatches. Raises MicrobatchError where that cannot be."""

    def slice(self, count: int, members: Sequence[Sequence[str]]) -> Sliced:
        """The step in ``count`` microbatches and one stage for each entry of ``members``.

        Args:
            count: number of microbatches.
            members: by stage the ids of its operators of the forward pass.
        """

    def piece(self, count: int, members: Sequence[Sequence[str]], stage: int) -> Sliced:
        """One stage of the step cut into stages, with the stages of all operators.

        Args:
            count: number of microbatches.
            members: by stage the ids of its operators of the forward pass.
            stage: number of the stage.
        """

    def updates_in_backward(self, count: int, members: Sequence[Sequence[str]], stage: int) -> bool:
        """Whether the backward loop over the layers of one stage of `slice` may update them.

        With one microbatch it may where nothing that other stages send after the loop has a part in the update.
        """

    def in_form(self, members: Sequence[Sequence[str]], stage: int, form: StepForm) -> CutStage:
        """One stage of the step cut into stages, in a form.

        Args:
            members: by stage the ids of its operators of the forward pass.
            stage: number of the stage.
            form: microbatches, recomputation with the ends of its layers, and other techniques.
        """
