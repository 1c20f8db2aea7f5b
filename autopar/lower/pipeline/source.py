"""`TracedStages`: a traced step that the search of pipelines can cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir import Graph
from autopar.ir.phases import LOOP
from autopar.ir.verify import verify
from autopar.lower.microbatch.parts import Again
from autopar.lower.pipeline.stage_graph import StageGraph, stage_graph
from autopar.lower.step import Step
from autopar.microbatch import Microbatching, analyze
from autopar.recompute import Phases
from autopar.search.source import Recomputation, Sliced
from autopar.stages import StageMap, StageParts, assign, stage_parts
from autopar.stages.layers import Layers


@dataclass(eq=False)
class TracedStages:
    """See `autopar.search.source.StageSource`. Remembers what it was asked.

    Args:
        step: the whole step.
    """

    step: Step
    counts: dict[int, Microbatching] = field(default_factory=dict)
    slices: dict[tuple[int, tuple[tuple[str, ...], ...]], tuple[Sliced, tuple[StageGraph, ...]]] = field(
        default_factory=dict
    )
    anew: dict[tuple[int, tuple[tuple[str, ...], ...], int, Recomputation], StageGraph] = field(default_factory=dict)

    def microbatches(self, count: int) -> Microbatching:
        """The step in ``count`` microbatches."""
        if count not in self.counts:
            self.counts[count] = analyze(self.step.graph, count)
        return self.counts[count]

    def slice(self, count: int, members: Sequence[Sequence[str]]) -> Sliced:
        """The step cut into stages."""
        return self._cut(count, members)[0]

    def recomputed(self, count: int, members: Sequence[Sequence[str]], stage: int, again: Recomputation) -> Graph:
        """The graph of one stage with a backward pass that computes anew what ``again`` does not hold."""
        return self.stage_graph(count, members, stage, again).graph

    def stage_graph(self, count: int, members: Sequence[Sequence[str]], stage: int, again: Recomputation) -> StageGraph:
        """A stage with what running it needs."""
        sliced, graphs = self._cut(count, members)
        if again.level == "none":
            return graphs[stage]
        key = (count, tuple(map(tuple, members)), stage, again)
        if key not in self.anew:
            parts = sliced.parts[stage]
            phases = Phases.of(self.step.graph, parts.body, parts.backward)
            found = Again(phases, again.layers, again.level)
            self.anew[key] = self._stage(sliced.map, parts, found)
        return self.anew[key]

    def _cut(self, count: int, members: Sequence[Sequence[str]]) -> tuple[Sliced, tuple[StageGraph, ...]]:
        key = (count, tuple(map(tuple, members)))
        if key not in self.slices:
            self.slices[key] = self._sliced(count, key[1])
        return self.slices[key]

    def _sliced(self, count: int, members: tuple[tuple[str, ...], ...]) -> tuple[Sliced, tuple[StageGraph, ...]]:
        graph = self.step.graph
        layers = Layers(members, (0.0,) * len(members), (0,) * (len(members) - 1))
        map = assign(graph, self.microbatches(count), layers, range(1, len(members) + 1))
        parts = stage_parts(graph, map)
        graphs = tuple(self._stage(map, p) for p in parts)
        return Sliced(map, parts, tuple(g.graph for g in graphs), tuple(_origins(g) for g in graphs)), graphs

    def _stage(self, map: StageMap, parts: StageParts, again: Again | None = None) -> StageGraph:
        found = stage_graph(self.step, map.found, parts, again)
        verify(found.graph)
        return found


def _origins(stage: StageGraph) -> dict[str, str]:
    found = dict(stage.program.origins)
    for op in stage.graph.operators:
        if op.primitive == "scan" and op.id.startswith(f"{LOOP}/"):
            body = stage.program.bounds[op.id].regions["body"]
            found.update((f"{op.id}/body/{id}", origin) for id, origin in body.origins.items())
    return found
