"""`TracedStages`: a traced step that the search of pipelines can cut.

`updated_parts` and `with_update` put the update of stacked layers into the backward loop of a stage that has one
microbatch a step. What microbatches add up is whole after all of them. With one, nothing is added up: the stage's loop
over microbatches takes the update of its stacks in, as operators after its backward pass, and from there the rewriting
of a whole step (`autopar.lower.layer_techniques`) takes it into the backward loop over layers. New state leaves the
loop in place of gradients, and lies where the old state did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, overload

from msgspec import structs

from autopar.errors import InfeasiblePlanError
from autopar.frontend import BoundGraph
from autopar.ir import Graph, Input, Layout, Output
from autopar.ir.analysis import closure, names_made, names_read
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.ir.text import graph_digest, with_digest
from autopar.ir.verify import verify
from autopar.lower.layer_loop import with_layer_loops
from autopar.lower.layer_techniques import backward_updates, loops_in_segments
from autopar.lower.padded import run_padded
from autopar.lower.pipeline.stage_graph import StageGraph, rewritten, run_recomputed, stage_graph, with_body
from autopar.lower.retrace import Recorder, Step
from autopar.lower.rewrites import blockwise_bound
from autopar.microbatch import Joined, Microbatching, analyze, analyze_with_barrier
from autopar.plan import StepForm
from autopar.search.source import CutStage, Sliced
from autopar.sharding.padding import renamed_dims
from autopar.solver.meter import Meter, Work
from autopar.stages import StageMap, StageParts, assign, stage_parts
from autopar.stages.isomorphic import KindTable, StageKind, first_of_kind
from autopar.stages.layers import Layers, members_of
from autopar.stages.parts import StageValue

Item = TypeVar("Item")
_Members = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class _Cut:
    """The step cut into stages: where everything runs, what each stage does, and of what kind it is.

    Args:
        members: by stage the ids of its operators of the forward pass.
        map: stages of all operators.
        parts: of each stage.
        table: compares stages.
        kinds: contents of stages, by number.
        formed: stages in the forms that were asked for before.
    """

    members: _Members
    map: StageMap
    parts: tuple[StageParts, ...]
    table: KindTable
    kinds: dict[int, StageKind] = field(default_factory=dict)
    formed: dict[tuple[int, StepForm], _Formed] = field(default_factory=dict)

    def kind(self, stage: int) -> StageKind:
        """Content of a stage, for comparison with others."""
        if stage not in self.kinds:
            self.kinds[stage] = self.table.kind(self.parts[stage])
        return self.kinds[stage]

    def layers(self, stage: int, form: StepForm) -> _Members:
        """Layers of a stage that recomputes something, by the ids of their operators; empty of others."""
        members = self.members[self.parts[stage].stage]
        return members_of(members, form.layer_ends or ()) if form.remat != "none" else ()


@dataclass(frozen=True)
class _Formed:
    """A stage in a form.

    Args:
        graph: of it.
        origins: of its operators.
        digest: of the first stage that is isomorphic to it, in this form.
        traced: operators of that one.
    """

    graph: Graph
    origins: Mapping[str, str]
    digest: str
    traced: int


class _OnDemand(Sequence[Item]):
    """Items that are formed when they are first asked for.

    Args:
        size: number of them.
        make: one, from its number.
    """

    def __init__(self, size: int, make: Callable[[int], Item]) -> None:
        self._size, self._make = size, make
        self._made: dict[int, Item] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> Item: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Item]: ...

    def __getitem__(self, at: int | slice) -> Item | Sequence[Item]:
        numbers = range(self._size)[at]
        if isinstance(numbers, range):
            return tuple(self[n] for n in numbers)
        if numbers not in self._made:
            self._made[numbers] = self._make(numbers)
        return self._made[numbers]


@dataclass(eq=False)
class TracedStages:
    """A traced step that can be cut into microbatches and pipeline stages, and remembers each cut.

    Args:
        step: the whole step.
        without_flush: whether its schedule has no flush: updates then do not wait for all microbatches.
        after: for each stage the stages whose results it waits for; empty where each waits for the one before.
        block_scores: scores of one head from which attention of stages runs in blocks; 0 leaves it as it is.
        meter: counts the operators of what is traced.
    """

    step: Step
    without_flush: bool = False
    after: tuple[tuple[int, ...], ...] = ()
    block_scores: int = 0
    meter: Meter = field(default_factory=Meter)
    counts: dict[int, Microbatching] = field(default_factory=dict)
    cuts: dict[tuple[int, _Members], _Cut] = field(default_factory=dict)
    tables: dict[tuple[int, tuple[str, ...]], KindTable] = field(default_factory=dict)
    kinds: dict[tuple[object, ...], tuple[_Cut, int]] = field(default_factory=dict)
    bases: dict[tuple[object, ...], StageGraph] = field(default_factory=dict)
    traced: dict[tuple[object, ...], tuple[StageGraph, str]] = field(default_factory=dict)

    def with_stages_after(self, after: tuple[tuple[int, ...], ...]) -> TracedStages:
        """The same step where stages are a graph, each after those that ``after`` says."""
        return replace(self, after=after, cuts={}) if after else self

    def metered(self, meter: Meter) -> TracedStages:
        """The same step, whose work another meter counts."""
        return replace(self, meter=meter)

    def microbatches(self, count: int) -> Microbatching:
        """The step in ``count`` microbatches."""
        if count not in self.counts:
            # Without a flush there is no moment at which all forward passes are done and no backward pass is.
            self.counts[count] = (analyze if self.without_flush else analyze_with_barrier)(self.step.graph, count)
        return self.counts[count]

    def slice(self, count: int, members: Sequence[Sequence[str]]) -> Sliced:
        """The step cut into stages, each formed when it is asked for.

        Of isomorphic stages one is traced; the others get its graph with other names.
        """
        cut = self._cut(count, members)
        stages = range(len(cut.parts))
        kinds = [cut.kind(s) for s in stages]
        planned = _OnDemand(len(stages), lambda s: self._planned(cut, s, StepForm(count)))
        graphs = _OnDemand(len(stages), lambda s: planned[s][0])
        return Sliced(cut.map, cut.parts, graphs, _OnDemand(len(stages), lambda s: planned[s][1]), first_of_kind(kinds))

    def piece(self, count: int, members: Sequence[Sequence[str]], stage: int) -> Sliced:
        """Graph and origins of one stage of the step; the other stages are not traced. See `StageSource`."""
        cut = self._cut(count, members)
        graph, origins = self._planned(cut, stage, StepForm(count))
        return Sliced(cut.map, (cut.parts[stage],), (graph,), (origins,))

    def in_form(self, members: Sequence[Sequence[str]], stage: int, form: StepForm) -> CutStage:
        """One stage of the step cut into stages, in a form; see `StageSource`."""
        return CutStage(*self._planned(self._cut(form.microbatches, members), stage, form))

    def updates_in_backward(self, count: int, members: Sequence[Sequence[str]], stage: int) -> bool:
        """Whether the backward loop over a stage's layers may update them; see `StageSource`."""
        return self._updated(self._cut(count, members), stage) is not None

    def stage_graph(self, members: Sequence[Sequence[str]], stage: int, form: StepForm) -> StageGraph:
        """The graph of one stage, with the primitives that jax binds to run it and the outputs of the step that it has.

        Args:
            members: by stage the ids of its operators of the forward pass.
            stage: number of the stage, from 0 on.
            form: microbatches, recomputation and what else the stage is turned into before it is sharded.
        """
        cut = self._cut(form.microbatches, members)
        return self._in_form(cut, stage, form, cut.layers(stage, form), {})

    def _cut(self, count: int, members: Sequence[Sequence[str]]) -> _Cut:
        key = (count, tuple(tuple(m) for m in members))
        if key not in self.cuts:
            layers = Layers(key[1], (0.0,) * len(members), (0,) * (len(members) - 1))
            ends = range(1, len(members) + 1)
            map = assign(
                self.step.graph,
                self.microbatches(count),
                layers,
                ends,
                without_flush=self.without_flush,
                after=self.after,
            )
            self.cuts[key] = _Cut(key[1], map, stage_parts(self.step.graph, map), self._table(count, map.microbatching))
        return self.cuts[key]

    def _table(self, count: int, microbatching: Microbatching) -> KindTable:
        """States of operators in ``microbatching``, changed by joins of contributions from several stages."""
        key = (count, tuple(j.name for j in microbatching.joined))
        if key not in self.tables:
            self.tables[key] = KindTable(self.step.graph, microbatching)
        return self.tables[key]

    def _planned(self, cut: _Cut, stage: int, form: StepForm) -> tuple[Graph, Mapping[str, str]]:
        """The graph of a stage and the origins of its operators: of the first isomorphic stage, under other names."""
        if (stage, form) not in cut.formed:
            cut.formed[stage, form] = self._formed(cut, stage, form)
        formed = cut.formed[stage, form]
        self.meter.keep(f"traced {formed.digest}", Meter({Work.TRACED: formed.traced}))
        return formed.graph, formed.origins

    def _formed(self, cut: _Cut, stage: int, form: StepForm) -> _Formed:
        kind, name = cut.kind(stage), f"{self.step.graph.name}/stage {cut.parts[stage].stage}"
        at = {id: n for n, id in enumerate(kind.operators)}
        # An operator of the forward pass that joins terms of several stages runs after the loop, and not again.
        layers = tuple(tuple(at[id] for id in layer if id in at) for layer in cut.layers(stage, form))
        # Inputs by their numbers, for other stages of the kind have other names.
        numbers = {str(v): str(n) for n, v in enumerate(cut.parts[stage].graph_inputs)}
        unnamed = structs.replace(form.of_graph, layer_ends=None, padded=renamed_dims(form.padded, numbers))
        key = (kind.key, unnamed, layers)
        first_cut, first = self.kinds.setdefault((kind.key, form.microbatches), (cut, stage))
        old = first_cut.kind(first)
        if key not in self.traced:
            digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
            names = {str(n): str(v) for n, v in enumerate(first_cut.parts[first].graph_inputs)}
            there = structs.replace(form, padded=renamed_dims(unnamed.padded, names))
            ids = tuple(tuple(old.operators[n] for n in layer) for layer in layers)
            self.traced[key] = self._in_form(first_cut, first, there, ids, self.bases), digest
        source, digest = self.traced[key]
        origins: Mapping[str, str]
        if old is kind:
            graph, origins = source.graph, _origins(source)
        else:
            graph = _renamed(source, old, kind, name, self.step.graph)
            origins = _renamed_origins(source, old, kind)
        # Equal graphs are made so again and again, and text takes longer than that.
        paths = ([i.name for i in graph.inputs], [(o.path, o.updates) for o in graph.outputs])
        recipe = repr((graph_digest(self.step.graph), digest, self.without_flush, self.after, graph.name, paths))
        graph = with_digest(graph, hashlib.sha256(recipe.encode()).hexdigest()[:24])
        return _Formed(graph, origins, digest, len(source.graph.operators))

    def _updated(self, cut: _Cut, stage: int) -> UpdatedParts | None:
        """Parts of a stage whose backward loop updates its layers; None where it may not."""
        if self.without_flush:
            return None
        return updated_parts(self.step.graph, cut.map.microbatching, cut.parts[stage])

    def _in_form(
        self, cut: _Cut, stage: int, form: StepForm, layers: _Members, bases: dict[tuple[object, ...], StageGraph]
    ) -> StageGraph:
        """A stage in a form.

        Args:
            cut: the step cut into stages.
            stage: number of the stage.
            form: the form.
            layers: ids of the operators of each layer, where something is recomputed.
            bases: stages as they are cut, by kind: each is traced once, and its forms are rewritten from it.
        """
        parts = cut.parts[stage]
        key = (cut.kind(stage).key, form.microbatches, form.backward_update)
        formed = bases.get(key) or self._cut_out(cut, stage, form)
        bases[key] = formed
        if form.remat != "none":
            formed = with_body(formed, partial(run_recomputed, parts, layers, form.remat))
        if form.backward_update:
            formed = with_update(formed)
        if form.padded:
            formed = rewritten(formed, lambda bound, env, recorder: run_padded(bound, form.padded, env, recorder))
        if form.segment_layers:
            formed = with_body(
                formed,
                lambda body, env, recorder: with_layer_loops(
                    body, loops_in_segments(body.graph, form.segment_layers), env, recorder
                ),
            )
        if form.backward_update:
            formed = with_state(formed)
        formed = replace(formed, program=blockwise_bound(formed.program, self.block_scores))
        verify(formed.graph)
        return formed

    def _cut_out(self, cut: _Cut, stage: int, form: StepForm) -> StageGraph:
        """A stage as it is cut, or with the update of its layers in its loop over microbatches."""
        parts, microbatching = cut.parts[stage], cut.map.microbatching
        if form.backward_update:
            updated = self._updated(cut, stage)
            if updated is None:
                raise InfeasiblePlanError(
                    f"stage {parts.stage} cannot take the form {' '.join(form.words)}",
                    cause="microbatches, or other stages, have a part in the gradients of its layers",
                    remedy="plan again: the function, or what is applied before, changed it",
                )
            parts, microbatching = updated.parts, updated.microbatching
        return stage_graph(self.step, microbatching, parts)


def _renamed(source: StageGraph, old: StageKind, new: StageKind, name: str, whole: Graph) -> Graph:
    """The graph of a stage that is like the one that was traced."""
    names = dict(zip((*old.values, *old.sent), (*new.values, *new.sent), strict=True))

    def renamed(values: Sequence[StageValue]) -> list[str]:
        return [str(replace(v, name=names[v.name])) for v in values]

    graph = source.graph
    inputs = dict(zip((i.name for i in graph.inputs), renamed(source.parts.graph_inputs), strict=True))
    paths = [*(whole.outputs[n].path for n in new.outputs), *renamed(source.parts.graph_sends)]
    return Graph(
        name,
        tuple(replace(i, name=inputs[i.name]) for i in graph.inputs),
        tuple(
            replace(op, operands=tuple(inputs.get(o, o) if isinstance(o, str) else o for o in op.operands))
            if any(o in inputs for o in op.reads)
            else op
            for op in graph.operators
        ),
        tuple(
            replace(
                o,
                operand=inputs.get(o.operand, o.operand) if isinstance(o.operand, str) else o.operand,
                path=path,
                updates=None if o.updates is None else inputs[o.updates],
            )
            for o, path in zip(graph.outputs, paths, strict=True)
        ),
    )


def _renamed_origins(source: StageGraph, old: StageKind, new: StageKind) -> Mapping[str, str]:
    ids = dict(zip(old.operators, new.operators, strict=True))
    return {id: ids[origin] for id, origin in _origins(source).items()}


def _origins(stage: StageGraph) -> dict[str, str]:
    origins = dict(stage.program.origins)
    for op in stage.graph.operators:
        if is_stage_loop(op):
            body = stage.program.bounds[op.id].regions["body"]
            origins.update((f"{op.id}/body/{id}", origin) for id, origin in body.origins.items())
    return origins


@dataclass(frozen=True)
class UpdatedParts:
    """Parts of a stage whose loop updates stacks of layers.

    Args:
        parts: of the stage.
        microbatching: of the step; the loop takes what the update reads.
    """

    parts: StageParts
    microbatching: Microbatching


def updated_parts(graph: Graph, microbatching: Microbatching, parts: StageParts) -> UpdatedParts | None:
    """A stage whose loop over one microbatch has the update of its stacks; None where none may be in it.

    Args:
        graph: the whole step.
        microbatching: of the step.
        parts: of the stage.
    """
    if microbatching.count > 1 or not parts.late:
        return None
    loops = backward_updates(_alone(graph, parts)).loops
    inside = {id for loop in loops for id in loop.updates}
    late = [op for op in graph.operators if op.id in set(parts.late)]
    moved = [op for op in late if op.id in inside]
    # What the update takes besides, as the number of the step, is computed in the loop too.
    taken = closure([op for op in late if op.id not in inside], names_read(moved))
    read = names_read([*moved, *taken])
    if not moved or read.intersection(r.name for r in (*parts.received_late, *parts.received_met)):
        return None
    returned = [graph.outputs[i].operand for i in parts.outputs]
    new_state = {name for loop in loops for name in loop.results}
    results = tuple(str(o) for o in returned if o in new_state)
    left = closure(late, [*returned, *parts.sent_late, *parts.sent_met], given=results)
    needed = {*names_read(left), *returned, *parts.sent_late, *parts.sent_met}
    joined = [j for j in parts.joined if j.name in needed]
    joined += [Joined(name, Layout.replicated(graph.types[name].rank)) for name in results]
    body = {*parts.body, *(op.id for op in (*moved, *taken))}
    ids = {op.id for op in left}
    of_loop = replace(
        parts,
        body=tuple(op.id for op in graph.operators if op.id in body),
        backward=parts.backward | {op.id for op in moved},
        joined=tuple(joined),
        late=tuple(id for id in parts.late if id in ids),
        part_of={id: n for id, n in parts.part_of.items() if id in ids},
    )
    outside = read - set(names_made([*moved, *taken])) - set(microbatching.body_inputs)
    inside_loop = names_made(op for op in graph.operators if op.id in body)
    inputs = (*microbatching.body_inputs, *sorted(outside.difference(inside_loop)))
    return UpdatedParts(of_loop, replace(microbatching, body_inputs=inputs))


def with_update(stage: StageGraph) -> StageGraph:
    """A stage whose backward loops over layers update the layers."""

    def run(body: BoundGraph, env: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        return with_layer_loops(body, backward_updates(body.graph).loops, env, recorder)

    return with_state(with_body(with_state(stage), run))


def with_state(stage: StageGraph) -> StageGraph:
    """A stage whose loop says which of its inputs are state, and which of its outputs replace some."""
    op = next(filter(is_stage_loop, stage.graph.operators), None)
    if op is None:
        return stage
    bound = stage.program.bounds[op.id]
    body, scan = bound.regions["body"], Scan.of(op)
    roles = {i.name: i.role for i in stage.graph.inputs}
    within = {str(o): i.name for o, i in zip(op.operands, body.graph.inputs[: scan.num_consts], strict=False)}
    replaced = {o.operand: o.updates for o in stage.graph.outputs if o.updates is not None}
    inputs = tuple(
        replace(i, role=roles.get(str(o), i.role)) for i, o in zip(body.graph.inputs, op.operands, strict=True)
    )
    outputs = tuple(
        replace(o, updates=within.get(str(replaced.get(v.name))))
        for o, v in zip(body.graph.outputs, op.results, strict=True)
    )
    region = replace(body.graph, inputs=inputs, outputs=outputs)
    regions = tuple((name, region if name == "body" else r) for name, r in op.regions)
    operators = tuple(replace(o, regions=regions) if o.id == op.id else o for o in stage.graph.operators)
    new = replace(bound, regions=MappingProxyType({**bound.regions, "body": replace(body, graph=region)}))
    program = replace(
        stage.program,
        graph=replace(stage.graph, operators=operators),
        bounds={**stage.program.bounds, op.id: new},
    )
    return replace(stage, program=program)


def _alone(graph: Graph, parts: StageParts) -> Graph:
    """Graph of a stage in one microbatch, without a loop."""
    ids = {*parts.before, *parts.body, *parts.late}
    inputs = {i.name: i for i in graph.inputs}
    names = [v.name for v in parts.graph_inputs]
    outputs = [graph.outputs[i] for i in parts.outputs]
    sent = (*parts.sent_late, *parts.sent_met, *parts.sent)
    return Graph(
        graph.name,
        tuple(inputs.get(n) or Input(n, graph.types[n]) for n in dict.fromkeys(names)),
        tuple(op for op in graph.operators if op.id in ids),
        (
            *(o if o.updates in names else replace(o, updates=None) for o in outputs),
            *(Output(n, f"sent {n}", graph.types[n]) for n in sent),
        ),
    )
