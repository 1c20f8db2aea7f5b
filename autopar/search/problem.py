"""`Problem`: what a search strategy is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph
from autopar.search.constraints import Constraint
from autopar.search.policy import SearchPolicy
from autopar.search.progress import Progress
from autopar.search.source import StageSource


class NotFasterError(InfeasiblePlanError):
    """No plan takes less than `Options.enough_s`."""


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Args:
        mesh_shape: sizes of the only logical mesh to consider; None considers all.
        memory_limit_bytes: bytes a device; None takes the memory of the smallest device.
        donated: names of the inputs whose buffers the program may reuse.
        num_microbatches: parts of the batch; None for any number.
        num_stages: pipeline stages; None for any number.
        schedule: name of the pipeline schedule, a `autopar.schedule.Schedule`, or "auto".
        time_limit_s: seconds that the solver may take for one mesh; None waits for the proof.
        seed: for strategies that draw numbers.
        steps: choices that strategies which search by trying may evaluate on one mesh; None for their own number.
        waiting: microbatches besides the one that runs whose forward pass is done and whose backward pass is not: a
            stage of a pipeline holds for each of them what its backward pass takes.
        equal: whether all stages of a pipeline must have as many devices, as where each is a worker of its own.
        on_workers: whether stages are carried out by workers in other processes, which keep all on their devices.
        apart: whether the forward and the backward pass are programs of their own, as on a stage of a pipeline: where
            memory is short neither has copies of the other's.
        enough_s: seconds of a step that a plan must stay below to be of use: another of so many is at hand.
        remat: what may be recomputed: "none", "selective", "full", or "auto" for any of them.
        offload: what may be kept in host memory while nothing needs it: "none", or "auto" for state of the update.
        progress: called with every better answer while a strategy searches.
        say: told in a line of text what is being worked on.
        explain: whether the error where nothing fits says the least memory that would do, which may take longer to find
            than that nothing fits; else it says a bound.
        constraints: where inputs lie.
    """

    mesh_shape: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    donated: frozenset[str] = frozenset()
    num_microbatches: int | None = 1
    num_stages: int | None = 1
    schedule: Any = "auto"
    time_limit_s: float | None = 60.0
    seed: int = 0
    steps: int | None = None
    waiting: int = 0
    equal: bool = False
    on_workers: bool = False
    apart: bool = False
    enough_s: float = math.inf
    remat: str = "auto"
    offload: str = "none"
    progress: Callable[[Progress], None] | None = None
    say: Callable[[str], None] | None = None
    explain: bool = True
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A graph to be planned on a cluster.

    Args:
        graph: verified graph.
        cluster: where it is to run.
        cost_model: what things cost there.
        options: what the user asked for.
        source: cuts the step into stages; None where only one stage can be planned.
        policy: thresholds of the search.
    """

    graph: Graph
    cluster: Cluster
    cost_model: CostModel
    options: Options = Options()
    source: StageSource | None = None
    policy: SearchPolicy = field(default_factory=SearchPolicy)

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes that a plan may use on a device."""
        return self.options.memory_limit_bytes or self.cluster.memory_bytes
