"""`TracedStep`: a traced function in each of the forms that are planned.

`rewritten` is applied before: products are computed in another order where that pays, and plans say so (`about`). What
a form does to a step is `autopar.lower.techniques`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import msgspec
from msgspec import structs

from autopar.api.constraints import Pin, constraints_of, merged
from autopar.api.options import ParallelOptions
from autopar.api.shared_state import SharedState
from autopar.cluster import Cluster
from autopar.cost import product_flops
from autopar.errors import MicrobatchError
from autopar.frontend import Traced
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.ir.loops import microbatch_loops
from autopar.ir.verify import verify
from autopar.lower.batch_loops import parts_side_by_side
from autopar.lower.batched_matrices import with_batched_matrices
from autopar.lower.layer_techniques import update_in_backward, updates_by_layer
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.rewrites import layer_ends, reassociated_bound
from autopar.lower.split_layers import SplitStep, group_count, layer_count, split_layers
from autopar.lower.techniques import FIRST, TECHNIQUES, in_form
from autopar.microbatch import operators_between
from autopar.plan import InputPart, InputRecord, OutputRecord, Plan, StepForm
from autopar.plan.form import NOT_OF_GRAPH
from autopar.plan.types import dtype_and_shape
from autopar.search.algebra import change_notes, pays
from autopar.search.constraints import Constraint
from autopar.search.operator_details import with_stage_operators
from autopar.search.source import FormedStep, LayeredStep
from autopar.solver.meter import Meter, Work


@dataclass(frozen=True, eq=False)
class TracedStep:
    """See `autopar.search.source.StepSource`. Remembers the forms that it was asked for.

    Args:
        traced: the function.
        donated: indices of the traced leaves whose buffers the step may reuse.
        pins: where the user wants inputs to lie.
        num_devices: of the cluster.
        split_step: the function with stacks taken apart, where that is done already.
        without_flush: whether pipelines are cut for a schedule without a flush.
        shared: another plan of several stages with whose state the function is planned; None where it is not.
        layered_steps: by groups and scores, the function with its stacks taken apart.
        forms: by form the function as one stage, with the form that it has.
        meter: counts the operators of what is traced.
    """

    traced: Traced
    donated: Sequence[int]
    pins: Sequence[Pin]
    num_devices: int
    split_step: SplitStep | None = None
    without_flush: bool = False
    shared: SharedState | None = None
    layered_steps: dict[tuple[int, int], LayeredStep] = field(default_factory=dict)
    forms: dict[StepForm, tuple[Traced, StepForm]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)

    def in_form(self, form: StepForm) -> FormedStep:
        """The graph of the whole step in one stage: in the microbatches and with the recomputation of ``form``.

        Raises:
            MicrobatchError: the step cannot be cut into so many microbatches.
        """
        traced, formed = self._in(form)
        elsewhere = {field: getattr(form, field) for field in NOT_OF_GRAPH}
        return FormedStep(traced.graph, structs.replace(formed, **elsewhere))

    def _in(self, form: StepForm) -> tuple[Traced, StepForm]:
        """The function in a form, see `as_one_stage`."""
        key = form.of_graph
        if key not in self.forms:
            self.forms[key] = as_one_stage(self.traced, self.num_devices, key)
            self.meter.add(Work.TRACED, len(self.forms[key][0].graph.operators))
        return self.forms[key]

    def may_update_by_layer(self) -> bool:
        """Whether the function has stacks of layers whose update may run a layer at a time."""
        return updates_by_layer(self.traced.graph)

    def update_in_backward(self) -> tuple[bool, str]:
        """Whether the update of stacks of layers may run inside of the backward loop over them, and what may not."""
        return self._in_backward

    @cached_property
    def _in_backward(self) -> tuple[bool, str]:
        return update_in_backward(self.traced.graph)

    def layered(
        self, num_stages: int | None, most_groups: int, *, one_loop: bool = False, block_scores: int = 0
    ) -> LayeredStep:
        """The step whose stacks of layers, one array for all layers, are an array for each group; see `StepSource`."""
        groups = group_count(self._layers, num_stages, most_groups, 1 if one_loop else 4)
        key = groups, block_scores
        if key not in self.layered_steps:
            self.layered_steps[key] = self._layered(groups, block_scores)
            self.meter.add(Work.TRACED, len(self.layered_steps[key].graph.operators))
        return self.layered_steps[key]

    @cached_property
    def _layers(self) -> int:
        """Length of the loop over stacked layers that a pipeline is cut along; 0 where there is none."""
        return layer_count(parts_side_by_side(self.traced).graph)

    def _layered(self, groups: int, block_scores: int) -> LayeredStep:
        """The step with stacks in groups, and attention in blocks from so many scores on."""
        stages, placed = None, tuple[Constraint, ...]()
        if self.shared is not None:
            layers_split = self.shared.split(self.traced)
            stages, placed = self.shared.stages(self.traced, layers_split)
        else:
            layers_split = self.split_step or split_layers(self.traced, groups)
        donated = frozenset(n for i in self.donated for n in layers_split.names(i))
        pinned = constraints_of(self.pins, self.traced.graph, self.num_devices, layers_split.names)
        return LayeredStep(
            layers_split.step.graph,
            TracedStages(layers_split.step, self.without_flush, block_scores=block_scores),
            donated,
            merged(placed, pinned),
            layers_split.groups,
            self._of_step(layers_split, block_scores),
            stages,
        )

    def with_details(self, plan: Plan) -> Plan:
        """A plan of several stages with the lines of its choices, which one of a search that was ended lacks."""
        scores = max(s.form.block_scores for s in plan.stages)
        for (_, block_scores), layered in self.layered_steps.items():
            if (layered.groups, block_scores) == (plan.content.stack_groups, scores):
                return with_stage_operators(plan, layered.graph, layered.source)
        return plan

    def form_of(self, plan: Plan) -> Traced:
        """The function in the form that a plan is of."""
        return self.traced if plan.content.pipeline is not None else self._in(plan.stages[0].form.asked)[0]

    def _of_step(self, layers_split: SplitStep, block_scores: int) -> Callable[[Plan], Plan]:
        return lambda plan: restacked(plan, self.traced.graph, layers_split, block_scores)


def as_planned(traced: Traced, plan: Plan) -> Traced:
    """A function in the form that a plan of one stage was made for."""
    (stage,) = plan.stages
    return as_one_stage(traced, len(stage.devices), stage.form)[0]


def as_one_stage(traced: Traced, num_devices: int, form: StepForm) -> tuple[Traced, StepForm]:
    """A step in a form: cut into microbatches, with recomputation and other techniques that change its graph.

    Args:
        traced: the step.
        num_devices: devices to which independent factorizations of matrices, batched into one operator, are split.
        form: the techniques; ends of layers are found where it does not say them.

    Returns the changed step, and the form without techniques that changed nothing, with the ends of layers where
    something is recomputed.

    Raises:
        InfeasiblePlanError: a technique that is asked for changes nothing.
        MicrobatchError: the step cannot be cut into so many microbatches.
    """
    first, form = in_form(traced, form, FIRST)
    plain = with_batched_matrices(first, num_devices)
    form = structs.replace(form, layer_ends=layer_ends(plain, form.remat, form.layer_ends))
    step, formed = in_form(plain, form, TECHNIQUES)
    if form.remat != "none" and microbatch_loops(step.graph) > 2:
        # What meets would be computed again, and the examples meet again for it.
        with contextlib.suppress(MicrobatchError):
            held = operators_between(plain.graph, form.microbatches)
            other = in_form(plain, form, TECHNIQUES, held)
            step, formed = min((step, formed), other, key=lambda s: microbatch_loops(s[0].graph))
    if step is not traced:
        verify(step.graph)
    return step, formed if formed.remat != "none" else structs.replace(formed, layer_ends=None)


def restacked(plan: Plan, graph: Graph, split_step: SplitStep, block_scores: int = 0) -> Plan:
    """``plan`` as a plan of ``graph``.

    Args:
        plan: made for ``split_step.step``.
        graph: of the user's step.
        split_step: what was taken apart.
        block_scores: scores of one head from which attention of its stages runs in blocks; 0 where it does not.

    A leaf in pieces has the stage and the layout of its first one, and a part for each stage and layout.
    """
    content = plan.content
    layers = _layers_by_stage(plan, graph, split_step)
    donated = set(content.donated)
    inputs = tuple(
        InputRecord.in_parts(i.name, str(i.type), i.role, _parts_of([content.inputs[n] for n in at]))
        for i, at in zip(graph.inputs, split_step.inputs, strict=True)
    )
    outputs = tuple(
        OutputRecord(o.path, str(o.type), content.outputs[at[0]].layout, o.updates, content.outputs[at[0]].stage)
        for o, at in zip(graph.outputs, split_step.outputs, strict=True)
    )
    warned = msgspec.structs.replace(
        content,
        inputs=inputs,
        outputs=outputs,
        fingerprint=fingerprint(graph),
        stack_groups=split_step.groups,
        stages=tuple(msgspec.structs.replace(s, layers=layers.get(n)) for n, s in enumerate(content.stages)),
        donated=tuple(
            i.name
            for n, i in enumerate(graph.inputs)
            if donated.issuperset(split_step.names(n)) and split_step.names(n)
        ),
    )
    return replace(plan, content=warned.in_blocks(block_scores))


def _parts_of(records: Sequence[InputRecord]) -> list[InputPart]:
    """The parts of a leaf by stage, from the records of its slices along dim 0; one record is of the leaf itself."""
    if len(records) == 1:
        (one,) = records
        return list(one.parts) or [InputPart(one.stage, one.layout, one.memory)]
    parts, end = list[InputPart](), 0
    for record in records:
        first, end = end, end + dtype_and_shape(record.type)[1][0]
        parts += [InputPart(r.stage, r.layout, r.memory, (first, end)) for r in record.of_stages]
    return parts


def _layers_by_stage(plan: Plan, graph: Graph, split_step: SplitStep) -> dict[int, tuple[int, int, int]]:
    """First stacked layer, number after the last one, and number of all layers, by stage.

    They are those of the first parameter that is in pieces: all such parameters are read by the same loops.
    """
    stacked = (n for n, i in enumerate(graph.inputs) if i.role == "parameter" and len(split_step.inputs[n]) > 1)
    leaf = next(stacked, None)
    if leaf is None:
        return {}
    total = graph.inputs[leaf].type.shape[0]
    each = total // split_step.groups
    by_stage: dict[int, tuple[int, int, int]] = {}
    for g, at in enumerate(split_step.inputs[leaf]):
        stage = plan.content.inputs[at].stage
        by_stage[stage] = (by_stage.get(stage, (g * each,))[0], (g + 1) * each, total)
    return by_stage


def rewritten(traced: Traced, options: ParallelOptions) -> Traced:
    """A traced function with products in another order where that pays and the options allow it."""
    if not options.rewrites:
        return traced
    num_devices = _num_devices(options)
    batch = [i.name for i in traced.graph.inputs if i.role == "batch"]
    worth = partial(pays, policy=options.policy.algebra, num_devices=num_devices)
    program, changes = reassociated_bound(traced.program, batch, worth)
    if not changes:
        return traced
    return replace(traced, program=program, rewrites=change_notes(changes, num_devices), as_written=traced)


def form_of(traced: Traced, plan: Plan) -> Traced:
    """The function as it was when ``plan`` was made: as it is written, or with products in another order."""
    return traced if plan.rewrites or traced.as_written is None else traced.as_written


def about(plan: Plan, traced: Traced) -> Plan:
    """``plan`` with facts about its function: what was rewritten, the FLOPs of its products as written,
    and the decorated functions that it calls."""
    written = traced.graph if traced.as_written is None else traced.as_written.graph
    facts = msgspec.structs.replace(
        plan.content,
        rewrites=traced.rewrites,
        product_flops=product_flops(written),
        notes=(*plan.content.notes, *(n for n in traced.nested if n not in plan.content.notes)),
    )
    return replace(plan, content=facts)


def _num_devices(options: ParallelOptions) -> int:
    if options.plan is not None:
        return len({device for stage in options.plan.stages for device in stage.devices})
    return (options.cluster or Cluster.local()).num_devices
