"""`parallelize(like=...)`: a step whose state lies as another plan has it, on one mesh or on stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.ir import Input, Layout
from autopar.lower.batch_loops import parts_side_by_side
from autopar.lower.split_layers import SplitStep, layer_count, split_layers
from autopar.plan import InputRecord, Plan
from autopar.runtime.ray.cluster import RayCluster
from autopar.search.constraints import Constraint, SharedStages


@dataclass(frozen=True, eq=False)
class SharedState:
    """The plan of the function of ``like=``: a step takes arguments that both have with the sharding of that plan.

    Args:
        plan: plan of that function.
        name: name of that function, for messages.
    """

    plan: Plan
    name: str

    @staticmethod
    def of(other: Any) -> SharedState:
        """The plan of what was given as ``like=``.

        Raises:
            AutoparError: it is no decorated function or plan, or was not planned yet.
        """
        if isinstance(other, Plan):
            return SharedState(other, other.content.program)
        plans: Callable[[], Sequence[Plan]] | None = getattr(other, "plans", None)
        if plans is None:
            raise AutoparError(
                f"like={other!r} is neither a decorated function nor a plan",
                remedy="parallelize(eval_step, like=train_step)",
            )
        plans_of_other = plans()
        name = str(getattr(other, "__name__", "like"))
        if not plans_of_other:
            raise AutoparError(
                f"like={name}: it has no plan yet", remedy=f"call {name}, or {name}.plan(...), before this function"
            )
        return SharedState(plans_of_other[-1], name)

    @staticmethod
    def of_stages(other: Any) -> SharedState | None:
        """`of` where the plan has several stages; None where it has not, or there is no ``other``."""
        shared = None if other is None else SharedState.of(other)
        return shared if shared is not None and shared.is_pipeline else None

    @property
    def is_pipeline(self) -> bool:
        """Whether the state lies on several stages."""
        return self.plan.num_stages > 1

    def constraints(self, traced: Traced) -> tuple[Constraint, ...]:
        """Constraints that give shared arguments the layout of the function of ``like=``, whose plan has one stage.

        Raises:
            AutoparError: no argument is the same.
        """
        sizes = self.plan.stages[0].mesh_shape
        return tuple(placed_as(i.name, r.layout, sizes, f"like {self.name}") for i, r in self._pairs(traced))

    def split(self, traced: Traced) -> SplitStep:
        """The step with its stacks taken apart as those of the other, whose plan has several stages.

        Raises:
            AutoparError: its layers cannot be taken apart so.
        """
        groups, layers = self.plan.content.stack_groups, layer_count(parts_side_by_side(traced).graph)
        if groups > 1 and (not layers or layers % groups):
            raise AutoparError(
                f"like={self.name}: its plan has the {groups} groups of a stack of layers on {self.plan.num_stages} "
                f"stages, and {traced.graph.name} loops over {layers or 'no'} layers",
                cause="layers of a stack are on different stages; no stage has the whole stack that this step takes",
                remedy="loop over the layers by jax.lax.scan, or leave out like=, which moves the state at every call",
            )
        return split_layers(traced, groups)

    def stages(self, traced: Traced, split_step: SplitStep) -> tuple[SharedStages, tuple[Constraint, ...]]:
        """The stages of the other plan with what of the step's state lies there, and how each piece of it lies.

        Args:
            traced: the step.
            split_step: with stacks taken apart, see `split`.

        Raises:
            AutoparError: no argument is the same, or the plan does not say which layers are on which stage.
        """
        stages = self.plan.stages
        index = {i.name: n for n, i in enumerate(traced.graph.inputs)}
        inputs: list[tuple[str, int]] = []
        constraints: list[Constraint] = []
        for i, record in self._pairs(traced):
            names = split_step.names(index[i.name])
            for group, name in enumerate(names):
                stage = record.stage if len(names) == 1 else self._stage_of(group, len(names))
                inputs.append((name, stage))
                placed = placed_as(name, record.layout, stages[record.stage].mesh_shape, f"like {self.name}")
                constraints.append(replace(placed, stage=stage))
        shared = SharedStages(
            tuple((s.devices[0], len(s.devices)) for s in stages),
            tuple(tuple(s.mesh_shape.values()) for s in stages),
            tuple(inputs),
            self.plan.num_microbatches,
        )
        return shared, tuple(constraints)

    def checked_stages(self, cluster: Cluster | None, num_stages: int | str) -> int:
        """The number of stages of the other.

        Args:
            cluster: where the step runs; None for the devices of this process.
            num_stages: that were asked for.

        Raises:
            AutoparError: the step cannot have them.
        """
        count = self.plan.num_stages
        if isinstance(cluster, RayCluster):
            raise AutoparError(
                f"like={self.name}: its plan has {count} stages, whose state is on Ray workers",
                cause="a second function takes its own layout of the state there",
                remedy="leave out like=: the workers bring the layouts together at every call",
            )
        if num_stages not in ("auto", count):
            raise AutoparError(
                f"like={self.name}: its plan has {count} stages, and num_stages={num_stages} was asked for",
                remedy=f'num_stages="auto", or {count}',
            )
        return count

    def _stage_of(self, group: int, groups: int) -> int:
        """The stage that has a piece of a stack."""
        for number, stage in enumerate(self.plan.stages):
            if stage.layers is not None:
                first, end, total = stage.layers
                if first <= group * total // groups < end:
                    return number
        raise AutoparError(
            f"like={self.name}: its plan does not give the stage of each layer",
            cause="it was saved by an older autopar",
            remedy="plan again",
        )

    def _pairs(self, traced: Traced) -> list[tuple[Input, InputRecord]]:
        """Arguments of the step with the records of those of the other that they are."""
        by_end = {(_without_argument(r.path), r.type): r for r in self.plan.content.inputs}
        pairs = [
            (i, by_end[end]) for i in traced.graph.inputs if (end := (_without_argument(i.name), str(i.type))) in by_end
            and i.role != "batch"
        ]  # fmt: skip
        if not pairs:
            raise AutoparError(
                f"like={self.name}: no argument of {traced.graph.name} has a path and a type of its arguments",
                cause="arguments are matched by what is after the argument's name: state.params['w'], params['w']",
                remedy=f"pass the state as {self.name} takes it; it has "
                f"{', '.join(r.path for r in self.plan.content.inputs[:3])}",
            )
        return pairs


def placed_as(name: str, layout: str, sizes: dict[str, int], text: str) -> Constraint:
    """The constraint that an input lies in a layout.

    Args:
        name: of the input.
        layout: its text in a plan.
        sizes: of the mesh.
        text: the constraint in words.
    """
    dims = Layout.parse(layout).dims
    shards = []
    for axes in dims:
        count = 1
        for a in axes:
            count *= sizes[a]
        shards.append(count)
    return Constraint(name, tuple(shards), text, dims)


def _without_argument(path: str) -> str:
    """A path without the name of the argument."""
    ends = [n for n in (path.find("."), path.find("[")) if n >= 0]
    return path[min(ends) :] if ends else ""
