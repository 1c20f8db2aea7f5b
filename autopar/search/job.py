"""`Request`, `Job` and `Solving`: what a user wants of a plan, what is decided of one, and when solvers stop.

A search has one request, which nothing changes. Its first job has what the user decided, and leaves the rest free; each
problem that the search states on the way has a job of its own, which decides more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.search.constraints import Constraint, SharedStages


@dataclass(frozen=True)
class Request:
    """Wishes of the user that hold for all jobs of a search.

    Args:
        attention: "plain" as the program says, "blocks", or "auto": whichever is faster.
        padding: whether dims that the devices do not divide may be padded inside of stages.
        collective_matmul: which gathers before products and scatters after them become messages next to their blocks:
            "none", "auto" for those that are faster so, or "always" for all that may.
        token_slices: slices of tokens in which microbatches pass through a pipeline: lengths, a number of even ones, or
            "auto" for the fastest; None for whole microbatches.
    """

    attention: str = "auto"
    padding: bool = False
    collective_matmul: str = "none"
    token_slices: Any = None


@dataclass(frozen=True)
class Job:
    """Decided parts of a plan; those that are None, or "auto", are free.

    Args:
        num_microbatches: parts of the batch; None for any number.
        num_stages: pipeline stages; None for any number.
        schedule: name of the pipeline schedule, a `autopar.schedule.Schedule`, or "auto".
        mesh_shape: sizes of the only logical mesh to consider; None considers all.
        memory_limit_bytes: bytes a device; None takes the memory of the smallest device.
        remat: what may be recomputed: "none", "selective", "full", or "auto" for any of them.
        offload: what may be kept in host memory while nothing needs it: "none", "auto" for state of the update and
            stacks of layers, "layers" where these stacks must, or "update" where state and masters must, which is
            updated there (`autopar.search.intra.host_update`).
        donated: names of the inputs whose buffers the program may reuse.
        constraints: where inputs lie.
        shared_stages: stages of another plan that this one has too; None where they are free.
    """

    num_microbatches: int | None = 1
    num_stages: int | None = 1
    schedule: Any = "auto"
    mesh_shape: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    remat: str = "auto"
    offload: str = "none"
    donated: frozenset[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()
    shared_stages: SharedStages | None = None


@dataclass(frozen=True)
class Solving:
    """Limits of solvers and of searches on one mesh.

    Args:
        time_limit_s: seconds of one solution, for who wants an answer by then: another run may differ. None ends it by
            its steps alone (`autopar.search.policy.MeshPolicy`).
        steps: choices that strategies which search by trying may evaluate; None for their own number.
        seed: for strategies that draw numbers.
    """

    time_limit_s: float | None = None
    steps: int | None = None
    seed: int = 0
