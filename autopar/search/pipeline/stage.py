"""The plan of one chosen stage: its sharding, and what it recomputes where memory is short.

Levels of recomputation that cost a stage more than its memory limit does, by a lower bound, are not planned.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.errors.names import counted
from autopar.plan import PlanContent, StepForm
from autopar.plan.text import bytes_text
from autopar.recompute import Level, Phases, select
from autopar.search.intra.host import share_bytes
from autopar.search.outcome import Bounded, NoRoomError
from autopar.search.pipeline import no_room
from autopar.search.pipeline.isomorphic_stages import StagePlanner, renamed_content
from autopar.search.pipeline.memory import stage_bytes
from autopar.search.pipeline.search_space import is_small
from autopar.search.pipeline.stage_problem import (
    PlacedStage,
    ScheduledStages,
    first_graph,
    graph_in_form,
    in_flight,
    stage_problem,
)
from autopar.search.problem import Problem
from autopar.search.sure_work import SureWork, sure_works
from autopar.search.techniques import (
    Asked,
    levels_of,
    may_hold_activations_on_hosts,
    may_update_in_backward,
    may_update_on_hosts,
    padded_dims,
    padding_notes,
    segments_of,
)
from autopar.search.trials import Trials
from autopar.sharding.padding import PaddedDim, renamed_dims


def cost_of_limit_s(content: PlanContent) -> float:
    """Seconds of a step that the memory limit costs a stage which recomputes nothing, at most.

    They are the difference of two sums of the seconds of operators and messages, before anything is hidden: that of
    the plan, and the least of any without the limit. 0 where the limit has no part in the plan, inf where that is not
    known.

    Args:
        content: the plan of the stage.
    """
    search = content.search
    if not content.memory_bound:
        return 0.0
    sum_s = next((c.step_time for c in search.considered if c.note == "chosen"), None)
    if search.unlimited_s is None or sum_s is None:
        return float("inf")
    return max(0.0, sum_s - search.unlimited_s)


def recomputed_s(placed: PlacedStage, level: Level) -> float:
    """Seconds of a step that a stage computes again at least, about: t(o, D) of what it does not hold, on D devices.

    Operators that go by memory are left out: what the step writes in any case may stay in a kernel where it is made
    again.
    m microbatches take m t(o, m D) >= t(o, D) for it, for time by the number of parts does not fall.

    Args:
        placed: the stage on its devices.
        level: what is recomputed.
    """
    pipeline = placed.pipeline
    problem, first = pipeline.problem, pipeline.first(placed.stage)
    if type(problem.cost_model) is not CostModel:
        return 0.0
    key = problem.store.key(
        "recomputed",
        problem.graph,
        problem.cost_model,
        pipeline.members[first],
        pipeline.table.num_microbatches,
        pipeline.layers,
        placed.part,
        level,
    )
    return problem.store.once(key, lambda: _recomputed_s(replace(placed, stage=first), level))


def _recomputed_s(placed: PlacedStage, level: Level) -> float:
    pipeline, stage, cost = placed.pipeline, placed.stage, placed.cost_model
    problem, parts = pipeline.problem, pipeline.sliced.parts[stage]
    phases = Phases.of(problem.graph, parts.body, parts.backward)
    selected = select(problem.graph, phases, pipeline.layers_of(stage), level)
    again = {id for group in selected.groups for id in group.operators}
    devices = placed.part.num_devices
    return sum(w.runs * cost.least_s(w.least, devices) for w in _works(problem) if _is_in(w.id, again))


def _works(problem: Problem) -> tuple[SureWork, ...]:
    """Sure work of the graph that computation binds."""
    graph, cost, blocks = problem.graph, problem.cost_model, problem.subproblem.block_scores
    key = problem.store.key("sure work", graph, cost, blocks)
    return problem.store.once(
        key, lambda: tuple(w for w in sure_works(graph, cost, blocks) if w.least.flops > w.least.bytes)
    )


def _is_in(id: str, operators: set[str]) -> bool:
    """Whether an operator, whose id follows those of the loops that it is in, is one of ``operators`` or in one."""
    while id:
        if id in operators:
            return True
        id = id.rpartition("/")[0]
    return False


def plan_stage(placed: PlacedStage, shared: StagePlanner, cutoff_s: float = math.inf) -> PlanContent | Bounded:
    """The plan of one stage, within the memory that microbatches in flight leave.

    Nothing is recomputed where that fits as it would be without a limit, or for next to nothing more. Else the
    fastest of all levels that fit is taken, each also with microbatches that wait in host memory, where that may be.
    `Bounded` where it takes ``cutoff_s`` or more.

    Args:
        placed: the stage on its devices.
        shared: plans one stage on its submesh.
        cutoff_s: busy seconds of a step from which its plan is of no use.

    Raises:
        InfeasiblePlanError: no level fits.
    """
    shape, asked = _first_shape(placed, shared), _shape_asked_for(placed)
    if shape != asked:
        try:
            return _on_mesh(placed, shape, shared, cutoff_s)
        except NoRoomError:
            raise
        except InfeasiblePlanError:
            pass
    return _on_mesh(placed, asked, shared, cutoff_s)


def submit_stages(
    pipeline: ScheduledStages,
    order: Sequence[int],
    placements: Sequence[tuple[int, int]],
    shared: StagePlanner,
    cutoff_s: float = math.inf,
) -> None:
    """Submits the first plan of each kind of stage to the pool of workers, which gets as far as it does.

    Args:
        pipeline: what is planned.
        order: in which stages are planned.
        placements: by stage its first device and the number of devices.
        shared: plans one stage on its submesh.
        cutoff_s: busy seconds of a step from which a stage's plan is of no use.
    """
    if shared.pool.process is None:
        return
    form = StepForm(pipeline.table.num_microbatches, levels_of(pipeline.problem.job.remat)[0])
    starts = pipeline.problem.cluster.group_starts
    placed = [PlacedStage(pipeline, stage, placement) for stage, placement in enumerate(placements)]
    first: dict[tuple[object, ...], tuple[int, tuple[int, ...] | None]] = {}
    for stage in order:
        (begin, size), shape = placements[stage], _first_shape(placed[stage], shared)
        first.setdefault((pipeline.first(stage), size, bisect_right(starts, begin), shape), (stage, shape))
    for stage, shape in first.values() if len(first) > 1 else ():
        with contextlib.suppress(InfeasiblePlanError):  # raised where it is planned
            shared.submit(stage_problem(placed[stage], form, shape, cutoff_s).problem)


def submit_like(
    pipeline: ScheduledStages,
    planned: PlanContent,
    stages: Sequence[int],
    placements: Sequence[tuple[int, int]],
    shared: StagePlanner,
    cutoff_s: float = math.inf,
) -> None:
    """Submits stages to the pool that are like one that is planned, where its plan does not fit their memory.

    Other arguments are those of `submit_stages`.

    Args:
        planned: the plan of the stage that they are like.
        stages: in the order in which they are planned, more in flight the later.
    """
    tried = levels_of(pipeline.problem.job.remat)
    form = StepForm(pipeline.table.num_microbatches, planned.stages[0].form.remat)
    first_forms = form.remat in (tried[0], tried[-1]) and form == planned.stages[0].form.asked
    if shared.pool.process is None or not planned.memory_bound or not first_forms:
        return
    for stage in stages:
        placed = PlacedStage(pipeline, stage, placements[stage])
        shape = _first_shape(placed, shared)
        with contextlib.suppress(InfeasiblePlanError):  # raised where it is planned
            shared.submit(stage_problem(placed, form, shape, cutoff_s).problem)


def _first_shape(placed: PlacedStage, shared: StagePlanner) -> tuple[int, ...] | None:
    """The shape of the logical mesh that a stage is planned on first; None for all of them."""
    asked = placed.pipeline.problem.job.mesh_shape is not None or not shared.meshes
    return _shape_asked_for(placed) if asked else shared.meshes[placed.stage]


def _shape_asked_for(placed: PlacedStage) -> tuple[int, ...] | None:
    asked = placed.pipeline.problem.job.mesh_shape
    return asked if asked is not None and math.prod(asked) == placed.placement[1] else None


def _on_mesh(
    placed: PlacedStage, shape: tuple[int, ...] | None, shared: StagePlanner, cutoff_s: float
) -> PlanContent | Bounded:
    """`plan_stage` on the logical mesh of a shape, or on all of them."""

    def attempt(form: StepForm, cutoff_s: float, explain: bool) -> _PlannedForm | Bounded:
        no_room.check_known(placed, form)
        try:
            at_level = _at_level(placed, form, shape, shared, cutoff_s)
        except NoRoomError as error:
            no_room.keep(placed, form, error)
            raise
        if isinstance(at_level, Bounded):
            return at_level
        content, free = at_level
        seconds = seconds_with_moves(content, placed.cost_model)
        forms.fitting.append(_PlannedForm(form, content, seconds, free))
        return forms.fitting[-1]

    forms = _Forms(placed, cutoff_s, Trials(attempt))
    trials = forms.trials
    plans = trials.run(forms, cutoff_s=cutoff_s, seconds=_seconds, ends=forms.ends)
    if not plans:
        if trials.bounded is not None:
            return trials.bounded
        errors = [*trials.impossible.values(), *trials.failures.values()]
        raise next((error for error in reversed(errors) if not isinstance(error, NoRoomError)), errors[-1])
    best = min(plans, key=_seconds)
    for dims in () if shared.relaxed else _paddings(placed, best):
        plans = trials.run([structs.replace(best.form, padded=dims)], cutoff_s=best.seconds, seconds=_seconds)
        best = min((best, *plans), key=_seconds)
    return best.content


@dataclass(frozen=True)
class _PlannedForm:
    """The plan of a form, its busy seconds a step, and whether the memory limit had no part in it."""

    form: StepForm
    content: PlanContent
    seconds: float
    free: bool


def _seconds(planned: _PlannedForm) -> float:
    return planned.seconds


@dataclass
class _Forms:
    """The forms of a stage, in the order in which they are tried; which come depends on the plans of those before.

    Args:
        placed, cutoff_s: as of `plan_stage`.
        trials: plans them.
        fitting: plans so far.
    """

    placed: PlacedStage
    cutoff_s: float
    trials: Trials[StepForm, _PlannedForm]
    fitting: list[_PlannedForm] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pipeline, self.stage = self.placed.pipeline, self.placed.stage
        count = self.pipeline.table.num_microbatches
        self.first, *self.more = (StepForm(count, level) for level in levels_of(self.pipeline.problem.job.remat))
        #: `first` with updates in the backward loop, where they may be.
        self.updated: list[StepForm] = []

    def __iter__(self) -> Iterator[StepForm]:
        first, more = self.first, self.more
        yield first
        if self.trials.bounded is not None:  # all others do more work
            return
        if may_update_in_backward(self._asked()):
            self.updated = [structs.replace(first, backward_update=True)]
        yield from self.updated
        there = may_hold_activations_on_hosts(self._asked())
        offloaded = [structs.replace(f, activations_offloaded=True) for f in (first, *more) if there]
        # After the host, the smallest: where it does not fit, nothing does that stays on the device.
        tried = [first, *offloaded, *filter(self._may_pay, more[-1:])]
        yield from tried[1:]
        if not self.trials.failures.keys() >= set(tried):
            yield from filter(self._may_pay, reversed(more[:-1]))
        if may_update_on_hosts(self._asked()):
            yield from (structs.replace(f, host_update=True) for f in (first, *more, *offloaded))
        if not self.fitting:
            yield from (structs.replace(f, remat=level.remat) for f in self.updated for level in more)
        if not self.fitting or _is_short(min(self.fitting, key=_seconds).content):
            yield from self._segmented()

    def _segmented(self) -> Iterator[StepForm]:
        short = (*self.updated, self.first)[0]
        lengths = segments_of(self._asked())
        segmented = [structs.replace(short, segment_layers=k) for k in lengths]
        yield from segmented
        if may_hold_activations_on_hosts(self._asked()):
            yield from (structs.replace(f, activations_offloaded=True) for f in segmented)
        if not self.fitting and self.more:
            yield from (structs.replace(short, remat=self.more[-1].remat, segment_layers=k) for k in lengths[:1])

    def _asked(self) -> Asked:
        """Question to techniques about the stage."""
        pipeline, count = self.pipeline, self.first.microbatches
        job = replace(pipeline.problem.job, num_microbatches=count)
        return Asked(
            replace(pipeline.problem, graph=pipeline.sliced.graphs[self.stage], job=job),
            updates_in_backward=partial(pipeline.source.updates_in_backward, count, pipeline.members, self.stage),
            in_flight=in_flight(pipeline.table, self.stage),
        )

    def ends(self, planned: _PlannedForm) -> bool:
        """Whether no form is tried after a plan."""
        negligible = self.pipeline.problem.policy.effort.gap
        quick = planned.form in (self.first, *self.updated)
        return quick and (planned.free or limit_is_negligible(planned.content, negligible))

    def _may_pay(self, form: StepForm) -> bool:
        """Whether recomputation may cost less than the memory limit."""
        pipeline, content = self.pipeline, next((p.content for p in self.fitting if p.form == self.first), None)
        if content is None or self.first.remat != "none" or is_small(pipeline.problem):
            return True
        again_s, unlimited_s = recomputed_s(self.placed, form.remat), content.search.unlimited_s or 0.0
        # Communication that computation hides is in a sum, and not in a step.
        most_s = pipeline.problem.policy.partition.near_best * self.cutoff_s
        return again_s < cost_of_limit_s(content) and unlimited_s + again_s < most_s


def _paddings(placed: PlacedStage, planned: _PlannedForm) -> tuple[tuple[PaddedDim, ...], ...]:
    """Ways to pad a stage that is planned without padding; dims are named as without segments, which come after it.

    They are found once for all stages that are the same but for names.
    """
    content, part = planned.content.stages[0], placed.part
    first, graph = first_graph(placed.pipeline, placed.stage, structs.replace(planned.form, segment_layers=0))
    problem = replace(placed.pipeline.problem, graph=first, cluster=part)
    key = problem.store.key("paddings", first, part.num_devices, content.host_bytes > 0, content.form.backward_update)
    options = problem.store.once(key, lambda: padded_dims(Asked(problem, content)))
    names = {i.name: j.name for i, j in zip(first.inputs, graph.inputs, strict=True)}
    return tuple(renamed_dims(dims, names) for dims in options)


def _is_short(content: PlanContent) -> bool:
    """Whether the limit costs as much as segments of layers do, which run the forward pass once more."""
    least_s = content.search.unlimited_s
    if not content.memory_bound or least_s is None:
        return False
    return content.search.objective >= least_s + dict(content.stages[0].work_times).get("forward", 0.0)


def limit_is_negligible(content: PlanContent, negligible: float) -> bool:
    """Whether a memory limit costs hardly anything, before what is hidden: other configurations do more work.

    Args:
        content: the plan.
        negligible: relative cost up to which it is hardly longer.
    """
    least_s = content.search.unlimited_s
    return least_s is not None and cost_of_limit_s(content) <= negligible * least_s


def seconds_with_moves(content: PlanContent, cost: CostModel) -> float:
    """Busy seconds a step of a stage; where moving activations to the host takes longer, the seconds of moving."""
    planned = content.stages[0]
    if not planned.form.activations_offloaded:
        return content.step_time
    times = dict(planned.work_times)
    moves = 2 * content.num_microbatches * cost.host_s(planned.activation_bytes)
    return content.step_time + max(0.0, moves - times.get("forward", 0.0) - times.get("backward", 0.0))


def _at_level(
    placed: PlacedStage, form: StepForm, shape: tuple[int, ...] | None, shared: StagePlanner, cutoff_s: float
) -> tuple[PlanContent, bool] | Bounded:
    """The plan in a form, and whether the limit had no part in it; it need not be found if it takes ``cutoff_s``."""
    pipeline, stage = placed.pipeline, placed.stage
    of_stage = stage_problem(placed, form, shape, cutoff_s)
    job, extra = of_stage.problem.job, of_stage.problem.subproblem.extra_in_flight
    unpadded = structs.replace(form, padded=(), segment_layers=0)

    def planned(limit_bytes: int) -> tuple[PlanContent, int] | Bounded:
        """The plan within a limit, and the bytes that the stage needs by it in all."""
        within = replace(of_stage.problem, job=replace(job, memory_limit_bytes=limit_bytes))
        content = shared.plan(within, f"stage {stage + 1} of {len(pipeline.members)}")
        if isinstance(content, Bounded):
            return content
        if of_stage.graph is not within.graph:
            content = renamed_content(content, within.graph, of_stage.graph)
        notes = padding_notes(graph_in_form(pipeline, stage, unpadded)[0], form.padded) if form.padded else ()
        content = content.in_form(of_stage.form, notes)
        if form.activations_offloaded:
            _check_host(content, of_stage.problem.cluster, of_stage.extra_in_flight)
        return content, stage_bytes(content, pipeline.sliced, pipeline.table, stage)

    limit = of_stage.problem.memory_limit_bytes
    for _ in range(pipeline.problem.policy.stages.limit_attempts):
        answer = planned(max(1, limit))
        if isinstance(answer, Bounded):
            return answer
        content, needed = answer
        if needed <= of_stage.whole_bytes:
            return content, not content.memory_bound
        # What is over has to come off what this plan needs itself, which may be less than it was allowed.
        limit = content.peak_memory + extra * content.stages[0].activation_bytes - (needed - of_stage.whole_bytes)
    raise _over_limit(needed, pipeline, stage, of_stage.whole_bytes)


def _check_host(content: PlanContent, part: Cluster, extra: int) -> None:
    """Raises InfeasiblePlanError where the activations of ``extra`` microbatches do not fit into host memory."""
    planned = content.stages[0]
    needed, there = extra * planned.activation_bytes + planned.host_bytes, share_bytes(part)
    if needed > there:
        raise InfeasiblePlanError(
            f"{counted(extra, 'microbatch')} in flight wait with {bytes_text(needed)} a device in host memory; "
            f"there is {bytes_text(there)}",
            remedy="more host_memory_bytes in the cluster file, or offload='none'",
        )


def _over_limit(needed: int, pipeline: ScheduledStages, stage: int, limit: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {stage} needs {bytes_text(needed)} ({needed} bytes) a device with its microbatches in flight by "
        f"schedule {pipeline.table.name}; the limit is {bytes_text(limit)}",
        cause="gradients that are added up, and what waits for weight gradients, are there next to the rest",
        remedy="more stages, more and smaller microbatches, or schedule='1f1b'",
    )
