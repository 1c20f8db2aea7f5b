"""The error tree: every mistake that a user can make has a type here.

A message states the fact with its values, the usual cause and the remedy, in that order.
"""

from autopar.errors.base import (
    AutoparError,
    CallbackError,
    CheckpointError,
    ClusterError,
    ConstraintError,
    InfeasiblePlanError,
    MicrobatchError,
    PlanMismatchError,
    ProcessLostError,
    ProcessMismatchError,
    ScheduleError,
    SliceError,
    TraceError,
    WorkerLostError,
)

__all__ = [
    "AutoparError",
    "CallbackError",
    "CheckpointError",
    "ClusterError",
    "ConstraintError",
    "InfeasiblePlanError",
    "MicrobatchError",
    "PlanMismatchError",
    "ProcessLostError",
    "ProcessMismatchError",
    "ScheduleError",
    "SliceError",
    "TraceError",
    "WorkerLostError",
]
