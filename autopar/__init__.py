"""autopar: automatic parallelization of JAX train steps.

Names are loaded when first used, so that planning and printing plans start without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar import hooks
from autopar.errors import (
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

if TYPE_CHECKING:
    from autopar import schedule, search, sharding, transforms
    from autopar.api import Compiled, ParallelFunction, check, parallelize
    from autopar.api.annotate import annotate
    from autopar.api.calibrate import calibrate
    from autopar.api.compare import compare
    from autopar.api.measure import measure
    from autopar.api.profile import profile
    from autopar.api.verify import verify
    from autopar.cluster import Cluster
    from autopar.plan import Plan
    from autopar.precision import Precision
    from autopar.runtime.checkpoints import Checkpoints
    from autopar.runtime.hosts.join import initialize, stopping
    from autopar.runtime.hosts.supervise import AGAIN
    from autopar.simulate import Timeline, simulate

__version__ = "0.2.0"

_HOMES = {
    "AGAIN": "autopar.runtime.hosts.supervise",
    "Checkpoints": "autopar.runtime.checkpoints",
    "Cluster": "autopar.cluster",
    "Compiled": "autopar.api",
    "ParallelFunction": "autopar.api",
    "Plan": "autopar.plan",
    "Precision": "autopar.precision",
    "Timeline": "autopar.simulate",
    "annotate": "autopar.api.annotate",
    "calibrate": "autopar.api.calibrate",
    "check": "autopar.api",
    "compare": "autopar.api.compare",
    "initialize": "autopar.runtime.hosts.join",
    "measure": "autopar.api.measure",
    "parallelize": "autopar.api",
    "profile": "autopar.api.profile",
    "schedule": "",
    "search": "",
    "sharding": "",
    "simulate": "",
    "stopping": "autopar.runtime.hosts.join",
    "transforms": "",
    "verify": "autopar.api.verify",
}

__all__ = [
    "AGAIN",
    "AutoparError",
    "CallbackError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Compiled",
    "ConstraintError",
    "InfeasiblePlanError",
    "MicrobatchError",
    "ParallelFunction",
    "Plan",
    "PlanMismatchError",
    "Precision",
    "ProcessLostError",
    "ProcessMismatchError",
    "ScheduleError",
    "SliceError",
    "Timeline",
    "TraceError",
    "WorkerLostError",
    "annotate",
    "calibrate",
    "check",
    "compare",
    "initialize",
    "measure",
    "parallelize",
    "profile",
    "schedule",
    "search",
    "sharding",
    "simulate",
    "stopping",
    "transforms",
    "verify",
]


hooks.HOOKS.offer("measure devices", lambda: import_module("autopar.api.calibrate").measured_group)
hooks.HOOKS.offer("connect to ray", lambda: import_module("autopar.runtime.ray.start").ray_cluster)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    module = _HOMES[name]
    return getattr(import_module(module), name) if module else import_module(f"autopar.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in globals() if n.startswith("__"))})
