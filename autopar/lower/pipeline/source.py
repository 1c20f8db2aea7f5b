"""`TracedStages`: a traced step that the search of pipelines can cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, overload

from msgspec import structs

from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph
from autopar.ir.phases import is_stage_loop
from autopar.ir.text import graph_digest, with_digest
from autopar.ir.verify import verify
from autopar.lower.layer_loop import with_layer_loops
from autopar.lower.layer_techniques import loops_in_segments
from autopar.lower.padded import run_padded
from autopar.lower.pipeline.stage_graph import StageGraph, rewritten, run_recomputed, stage_graph, with_body
from autopar.lower.pipeline.updated import UpdatedParts, updated_parts, with_state, with_update
from autopar.lower.retrace import Step
from autopar.lower.rewrites import blockwise_bound
from autopar.microbatch import Microbatching, analyze, analyze_with_barrier
from autopar.plan import StepForm
from autopar.search.source import Sliced
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
    """The step cut into stages: where everything runs, what each stage does, and of what kind it is."""

    members: _Members
    map: StageMap
    parts: tuple[StageParts, ...]
    table: KindTable
    kinds: dict[int, StageKind] = field(default_factory=dict)

    def kind(self, stage: int) -> StageKind:
        """Content of a stage, for comparison with others."""
        if stage not in self.kinds:
            self.kinds[stage] = self.table.kind(self.parts[stage])
        return self.kinds[stage]

    def layers(self, stage: int, form: StepForm) -> _Members:
        """Layers of a stage that recomputes something, by the ids of their operators; empty of others."""
        members = self.members[self.parts[stage].stage]
        return members_of(members, form.layer_ends or ()) if form.remat != "none" else ()


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
    """See `autopar.search.source.StageSource`. Remembers what it was asked.

    Args:
        step: the whole step.
        without_flush: whether its schedule has none, see `autopar.stages.assign`.
        after: where stages are a graph what each waits for, see there.
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

        Of isomorphic stages one is traced; the others are it under other names.
        """
        cut = self._cut(count, members)
        stages = range(len(cut.parts))
        kinds = [cut.kind(s) for s in stages]
        planned = _OnDemand(len(stages), lambda s: self._planned(cut, s, StepForm(count)))
        graphs = _OnDemand(len(stages), lambda s: planned[s][0])
        return Sliced(cut.map, cut.parts, graphs, _OnDemand(len(stages), lambda s: planned[s][1]), first_of_kind(kinds))

    def piece(self, count: int, members: Sequence[Sequence[str]], stage: int) -> Sliced:
        """One stage of the step cut into stages; the others are not traced."""
        cut = self._cut(count, members)
        graph, origins = self._planned(cut, stage, StepForm(count))
        return Sliced(cut.map, (cut.parts[stage],), (graph,), (origins,))

    def in_form(self, members: Sequence[Sequence[str]], stage: int, form: StepForm) -> Graph:
        """The graph of one stage in a form."""
        return self._planned(self._cut(form.microbatches, members), stage, form)[0]

    def updates_in_backward(self, count: int, members: Sequence[Sequence[str]], stage: int) -> bool:
        """Whether the backward loop of a stage may update its layers."""
        return self._updated(self._cut(count, members), stage) is not None

    def stage_graph(self, members: Sequence[Sequence[str]], stage: int, form: StepForm) -> StageGraph:
        """A stage in a form with what running it needs."""
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
        self.meter.keep(f"traced {digest}", Meter({Work.TRACED: len(source.graph.operators)}))
        origins: Mapping[str, str]
        if old is kind:
            graph, origins = source.graph, _origins(source)
        else:
            graph = _renamed(source, old, kind, name, self.step.graph)
            origins = _renamed_origins(source, old, kind)
        # Equal graphs are made so again and again, and text takes longer than that.
        paths = ([i.name for i in graph.inputs], [(o.path, o.updates) for o in graph.outputs])
        recipe = repr((graph_digest(self.step.graph), digest, self.without_flush, self.after, graph.name, paths))
        return with_digest(graph, hashlib.sha256(recipe.encode()).hexdigest()[:24]), origins

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
