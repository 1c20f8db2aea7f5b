"""Techniques as the planner sees them: which a step or a stage may take, with which values, and the notes on them.

`TECHNIQUES` lists them in the order in which lowering applies them (`autopar.lower.techniques`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from autopar.search.techniques.attention_blocks import BLOCKS, stage_block_scores
from autopar.search.techniques.backward_update import BACKWARD_UPDATE, LAYERED_UPDATE
from autopar.search.techniques.base import Asked, PlannedTechnique, body_of
from autopar.search.techniques.padding import PADDING
from autopar.search.techniques.segments import SEGMENTS

#: By field of `StepForm`, in the order in which they are applied. Microbatches, recomputation and hosts are the
#: search's own: each value of theirs is a region, with looks and bounds of its own.
TECHNIQUES: Final = MappingProxyType({t.field: t for t in (PADDING, BACKWARD_UPDATE, SEGMENTS, LAYERED_UPDATE, BLOCKS)})

__all__ = [
    "BACKWARD_UPDATE",
    "BLOCKS",
    "LAYERED_UPDATE",
    "PADDING",
    "SEGMENTS",
    "TECHNIQUES",
    "Asked",
    "PlannedTechnique",
    "body_of",
    "stage_block_scores",
]
