"""`Problem`: what a search strategy is given; `Progress`: what it says while it searches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.schedule.without_flush.schedules import updates_stagewise
from autopar.search.anytime import Anytime
from autopar.search.clock import units_of
from autopar.search.job import Job, Request, Solving
from autopar.search.policy import SearchPolicy
from autopar.search.source import StageSource
from autopar.search.store import Store
from autopar.search.trail import Trail
from autopar.search.worker_pool import WorkerPool
from autopar.solver.meter import Meter


@dataclass(frozen=True)
class Progress:
    """A better answer than all before it in the same search.

    Args:
        strategy: name of the search.
        seconds: wall-clock seconds since the search began.
        objective_s: predicted seconds of a step of the best answer so far.
        steps: choices that were evaluated until then; 0 where a strategy does not count.
    """

    strategy: str
    seconds: float
    objective_s: float
    steps: int = 0


@dataclass(frozen=True)
class Subproblem:
    """Demands of the planner and the runtime on a problem, beyond the user's options.

    Args:
        extra_in_flight: microbatches besides the one that runs whose forward pass is done and whose backward pass is
            not: a stage of a pipeline keeps the activations of each.
        uniform_stages: whether all stages of a pipeline have as many nodes, as where each is a worker of its own.
        on_workers: whether stages are carried out by workers in other processes.
        separate_programs: whether the forward and the backward pass are programs of their own, as on a stage of a
            pipeline: where memory is short neither has copies of the other's.
        arriving: inputs of a stage's graph that come with every microbatch, placed as the loop over them takes them.
        met: outputs of a stage's graph that are made where examples meet, before its backward passes.
        cutoff_s: seconds of a step that a plan must stay below to be of use: another plan takes so many.
        tried_stages: numbers of stages that may be faster than another plan; None for any.
        first_count: microbatches in which pipelines are planned first, where they fit: the fastest by a relaxation; 0
            where none says so.
        stages_per_worker: number of stages on each worker of the pipelines that are planned where the schedule is free;
            those of two are planned in `first_count` microbatches alone.
        ample_memory: whether plans are of use only where the memory limit has no part in that of some mesh.
        relaxation_only: whether a relaxation that keeps the limit is the answer, whatever its gap.
        any_that_fits: of relaxations, whether the first that fits will do, whatever the limit costs.
        block_scores: scores of one head from which attention of stages runs in blocks; 0 where it does not.
        other_stages: stages besides this one that its worker has, the state of each of which takes as much there;
            `extra_in_flight` then counts their microbatches too.
    """

    extra_in_flight: int = 0
    uniform_stages: bool = False
    on_workers: bool = False
    separate_programs: bool = False
    arriving: frozenset[str] = frozenset()
    met: frozenset[str] = frozenset()
    cutoff_s: float = math.inf
    tried_stages: tuple[int, ...] | None = None
    first_count: int = 0
    stages_per_worker: int = 1
    ample_memory: bool = False
    relaxation_only: bool = False
    any_that_fits: bool = False
    block_scores: int = 0
    other_stages: int = 0


@dataclass(frozen=True)
class Reporting:
    """Receivers of reports while a problem is planned. Plans do not depend on them.

    Args:
        progress: called with every better answer while a strategy searches.
        log: called with a line of text when a phase begins.
        explains_infeasible: whether the error where nothing fits says the least memory that would do, which may take
            longer to find than that nothing fits; else it says a bound.
    """

    progress: Callable[[Progress], None] | None = None
    log: Callable[[str], None] | None = None
    explains_infeasible: bool = True


@dataclass(frozen=True)
class Problem:
    """A graph to be planned on a cluster.

    Args:
        graph: verified graph.
        cluster: where it is to run.
        cost_model: what things cost there.
        request: wishes of the user, the same in all problems of a search.
        job: what is decided of the plan; the rest is free.
        solving: when solvers stop.
        source: cuts the step into stages; None where only one stage can be planned.
        policy: thresholds of the search.
        subproblem: what holds besides what the user asked for.
        reporting: who is told what meanwhile.
        anytime: takes whole plans, and says between two pieces of work whether to go on; None goes on to the end.
        store: answers that all problems of the search share.
        settings: those of jax under which the graph was traced, as text; None where they have none that is the same in
            every process.
        meter: counts what planning it takes.
        trail: takes note of what becomes of the regions of the decision.
        pool: makes calls in another process, of all regions of the search.
    """

    graph: Graph
    cluster: Cluster
    cost_model: CostModel
    request: Request = field(default_factory=Request)
    job: Job = field(default_factory=Job)
    solving: Solving = field(default_factory=Solving)
    source: StageSource | None = None
    policy: SearchPolicy = field(default_factory=SearchPolicy)
    subproblem: Subproblem = Subproblem()
    reporting: Reporting = Reporting()
    anytime: Anytime | None = None
    store: Store = field(default_factory=Store, compare=False, repr=False)
    settings: str | None = ""
    meter: Meter = field(default_factory=Meter, compare=False, repr=False)
    trail: Trail = field(default_factory=Trail, compare=False, repr=False)
    pool: WorkerPool = field(default_factory=WorkerPool, compare=False, repr=False)

    @property
    def names_pipeline(self) -> bool:
        """Whether a pipeline is asked for by name: a schedule whose stages update apart, or slices of tokens."""
        return updates_stagewise(self.job.schedule) or self.request.token_slices is not None

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes that a plan may use on a device."""
        return self.job.memory_limit_bytes or self.cluster.memory_bytes

    @property
    def is_alone(self) -> bool:
        """Whether few integer programs are solved: of one stage with ample memory, on CPUs of one node, where stages in
        one process do not overlap."""
        on_cpus = all("cpu" in d.jax_kinds for d in self.cluster.device_types)
        return self.subproblem.ample_memory and self.cluster.num_nodes == 1 and on_cpus

    def offer(self, plan: Plan) -> None:
        """Takes note of a whole plan, for a search that ends early."""
        if self.anytime is not None:
            self.anytime.offer(plan)

    def checkpoint(self) -> None:
        """Ends the search where its time is up and a plan is known. Called between two pieces of work.

        Raises:
            SearchEndedError: the search ends.
        """
        if self.anytime is not None:
            self.anytime.checkpoint()

    def spend(self) -> None:
        """Ends the search where its work units are spent and a plan is known. Called where no other thread counts work.

        Raises:
            SearchEndedError: the search ends.
        """
        if self.anytime is not None and self.policy.effort.budget is not None:
            self.anytime.spent(units_of(self.meter))

    def log(self, text: str) -> None:
        """Tells a line of text to who listens."""
        if self.reporting.log is not None:
            self.reporting.log(text)
