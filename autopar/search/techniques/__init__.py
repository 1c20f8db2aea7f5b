"""Techniques as the planner sees them: which a step or a stage may take, with which values, and the notes on them.

`TECHNIQUES` lists them in the order in which lowering applies them (`autopar.lower.techniques`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from autopar.search.techniques.attention_blocks import BLOCKS, stage_block_scores
from autopar.search.techniques.backward_update import BACKWARD_UPDATE, LAYERED_UPDATE
from autopar.search.techniques.base import Asked, PlannedTechnique, body_of
from autopar.search.techniques.host_memory import ACTIVATIONS_ON_HOST, HOST_UPDATE
from autopar.search.techniques.microbatches import MICROBATCHES
from autopar.search.techniques.padding import PADDING
from autopar.search.techniques.recomputation import RECOMPUTATION, levels_of
from autopar.search.techniques.segments import SEGMENTS

_IN_ORDER: tuple[PlannedTechnique, ...] = (
    PADDING,
    RECOMPUTATION,
    BACKWARD_UPDATE,
    SEGMENTS,
    LAYERED_UPDATE,
    MICROBATCHES,
    BLOCKS,
    HOST_UPDATE,
    ACTIVATIONS_ON_HOST,
)
#: By field of `StepForm`, in the order in which they are applied; those of hosts change no graph.
TECHNIQUES: Final = MappingProxyType({t.field: t for t in _IN_ORDER})

__all__ = [
    "ACTIVATIONS_ON_HOST",
    "BACKWARD_UPDATE",
    "BLOCKS",
    "HOST_UPDATE",
    "LAYERED_UPDATE",
    "MICROBATCHES",
    "PADDING",
    "RECOMPUTATION",
    "SEGMENTS",
    "TECHNIQUES",
    "Asked",
    "PlannedTechnique",
    "body_of",
    "levels_of",
    "stage_block_scores",
]
