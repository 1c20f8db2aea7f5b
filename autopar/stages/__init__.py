"""Layers and stages: which part of a train step runs on which stage of a pipeline."""

from autopar.stages.assign import StageMap, assign
from autopar.stages.layers import ForwardCuts, Layers, cluster
from autopar.stages.parts import Received, ReceivedLate, StageParts, stage_parts

__all__ = [
    "ForwardCuts",
    "Layers",
    "Received",
    "ReceivedLate",
    "StageMap",
    "StageParts",
    "assign",
    "cluster",
    "stage_parts",
]
