"""How layers are dealt out to the stages of a pipeline, and the parameters of each stage."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from benchmarks.published.transformer.plan import TrainingPlan
from benchmarks.published.transformer.spec import TransformerSpec


@dataclass(frozen=True, slots=True)
class StageShape:
    """What one stage holds.

    Args:
        index: 0-based.
        layers: layers of it.
        first, last: it has the embedding; it has the output projection.
    """

    index: int
    layers: int
    first: bool
    last: bool


@functools.lru_cache(maxsize=4096)
def stage_shapes(spec: TransformerSpec, plan: TrainingPlan) -> tuple[StageShape, ...]:
    """The stages: as many layers each, and of what is left over one to each stage from the middle outwards.

    The ends are given least since they have the embedding and the output projection besides.
    """
    p = plan.pp
    base, rest = divmod(spec.layers, p)
    middle_first = sorted(range(p), key=lambda i: (abs(2 * i - (p - 1)), i))
    more = frozenset(middle_first[:rest])
    return tuple(StageShape(i, base + (i in more), i == 0, i == p - 1) for i in range(p))


def dense_parameters(spec: TransformerSpec, plan: TrainingPlan, stage: StageShape) -> float:
    """Parameters of a stage on one device, experts left out."""
    layer = spec.attention_parameters + spec.router_parameters
    if spec.experts == 1:
        layer += spec.expert_parameters
    ends = 0
    if stage.first:
        ends += spec.embedding_parameters
    if stage.last:
        ends += spec.vocab * spec.hidden if spec.tied and not stage.first else spec.output_parameters
    return (stage.layers * layer + ends) / plan.tp


def expert_parameters(spec: TransformerSpec, plan: TrainingPlan, stage: StageShape) -> float:
    """Parameters of the experts of a stage on one device."""
    if spec.experts == 1:
        return 0.0
    return stage.layers * spec.experts * spec.expert_parameters / (plan.tp * plan.ep)
