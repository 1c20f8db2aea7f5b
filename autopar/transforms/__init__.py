"""Techniques that change what a train step computes, as functions from steps to steps that run on any plan.

Each is asked for by name; "auto" chooses none. docs/transforms.md has the equations, memory and oracle of each.
"""

from autopar.transforms.asynchronous import (
    AsynchronousRun,
    Clocks,
    Corrected,
    WorkerEvent,
    asynchronous,
    drawn_events,
    replay,
)
from autopar.transforms.corrections import Extrapolated, dc_asgd, pipemare_rate, staleness_aware_rate
from autopar.transforms.dealt_tables import TableDeal, deal_tables
from autopar.transforms.delayed import Correction, Delayed, DelayedState, Prediction, delayed
from autopar.transforms.diloco import Diloco, DilocoState, Streaming, diloco, local_sgd
from autopar.transforms.encoded import encoded, packed_masks
from autopar.transforms.formats import FORMATS, Encoded, Format, mean_over_replicas
from autopar.transforms.interchanged import interchanged
from autopar.transforms.loss_scaling import LossScaled, ScaledState, loss_scaled
from autopar.transforms.narrow import narrow_mean, narrow_parameters
from autopar.transforms.on_disk import OnDiskState, check_on_disk, on_disk
from autopar.transforms.one_bit_adam import Compression, OneBitAdamState, Signs, one_bit_adam
from autopar.transforms.optimizers import Transformation
from autopar.transforms.placed_experts import PlacedExperts, PlacedState, balanced_order, placed_experts
from autopar.transforms.powersgd import PowerSgdState, powersgd
from autopar.transforms.replicas import PerReplica, per_replica, per_replica_value_and_grad
from autopar.transforms.split import Split, split
from autopar.transforms.state import Parameters

__all__ = [
    "FORMATS",
    "AsynchronousRun",
    "Clocks",
    "Compression",
    "Corrected",
    "Correction",
    "Delayed",
    "DelayedState",
    "Diloco",
    "DilocoState",
    "Encoded",
    "Extrapolated",
    "Format",
    "LossScaled",
    "OnDiskState",
    "OneBitAdamState",
    "Parameters",
    "PerReplica",
    "PlacedExperts",
    "PlacedState",
    "PowerSgdState",
    "Prediction",
    "ScaledState",
    "Signs",
    "Split",
    "Streaming",
    "TableDeal",
    "Transformation",
    "WorkerEvent",
    "asynchronous",
    "balanced_order",
    "check_on_disk",
    "dc_asgd",
    "deal_tables",
    "delayed",
    "diloco",
    "drawn_events",
    "encoded",
    "interchanged",
    "local_sgd",
    "loss_scaled",
    "mean_over_replicas",
    "narrow_mean",
    "narrow_parameters",
    "on_disk",
    "one_bit_adam",
    "packed_masks",
    "per_replica",
    "per_replica_value_and_grad",
    "pipemare_rate",
    "placed_experts",
    "powersgd",
    "replay",
    "split",
    "staleness_aware_rate",
]
