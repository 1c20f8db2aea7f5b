"""`SearchPolicy`: every threshold of the search, as values that a problem carries.

A threshold says where effort stops paying. Each field has the reason for its value, and says so where that is a choice
that no measurement supports. `python -m benchmarks thresholds` plans drawn problems with half and with twice of each:
"seven of seven drawn plans" are all of those problems that read the threshold (2026-11-28, eight problems of seed
6006). Tests and benchmarks give other values with `dataclasses.replace`. `with_effort` sets how much work a search may
take, and how near to its bound it stops, by a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.solver.goal import PLAN_GAP


@dataclass(frozen=True)
class OverlapPolicy:
    """Iterations in which a sharding is solved again with hidden communication, on devices that send next to computing.

    Args:
        link_shares: for each answer beyond the first the share of its seconds that a hidden conversion costs still. Of
            eight GPTs none got faster with a share of 0 (up to 3.5 times slower: all use the same idle links), all
            with 0.1 or 0.5, by 0 to 21%; with both in turn by 14% on average, and a third share gained 0.3%.
        stall_share: share of a step that waits for collectives, up to which the answer stays: no more than it can be
            won, and a part of it is. With half as much GPT in two stages takes 17% more work for the same plan.
        most_ruled_out: layouts that are ruled out of an answer, one by one, for its step waits for them. Of thirty
            answers that were solved up to 64 times without a layout, twelve got faster by more than 1%, all by the
            seventh; one got faster after the seventh too: a GPT on 1,024 V100, by 15% up to the seventh and by 21% up
            to the 37th, which took twice as long to plan.
        joining_factors: thresholds that are compared, over the bytes that take as long to send as the latency.
    """

    link_shares: tuple[float, ...] = (0.1, 0.5)
    stall_share: float = 0.02
    most_ruled_out: int = 8
    joining_factors: tuple[int, ...] = (1, 4, 16, 64)


@dataclass(frozen=True)
class SizePolicy:
    """Which problems are small or large.

    Args:
        tiny_operators: operators of a step up to which all its slicings and, of one stage, all combinations of
            microbatches and recomputation are planned, so that no estimate has a part in the plan.
        few_operators: operators below which numbers of microbatches down to 1 are tried: such a step may be bound by
            the latency of links, and each number takes a fraction of a second.
        small_operators: operators below which each number of stages is planned exactly, then numbers of microbatches
            next to the best: a pair takes a fraction of a second there.
        large_nodes: nodes above which a cluster is large: a stage is whole nodes, and one number of stages is tried.
    """

    tiny_operators: int = 60
    few_operators: int = 300
    small_operators: int = 1000
    large_nodes: int = 16


@dataclass(frozen=True)
class EnumerationPolicy:
    """Which numbers of stages and microbatches are enumerated.

    Args:
        most_stages_of_few: of a step of few operators any number of stages up to this is tried, a power of two or not:
            eight layers on two nodes that are joined slowly take 4% less in three stages than in four.
        most_slicings: slicings of a tiny step up to which all of them are planned; more go to the dynamic program. With
            half and with twice three of three perceptrons have the same plans, one for 0.24 of the work with half.
        most_microbatches_per_stage: most that are tried where only the number of stages is given, and ranked by
            interpolated costs where both are free: the bubble of 1F1B is a seventeenth there. With half and with twice
            seven of seven drawn plans are the same, for as much work.
        layers_per_stage: layers that a step is clustered into for each stage: the dynamic program moves a cut by a
            quarter of a stage.
        most_layers: layers in all, and groups into which a stack of them is split where the number of stages is free:
            the dynamic program takes time by their cube.
        most_mesh_axes: axes of a mesh of named degrees: strategies of an operator grow as its loops to their power, and
            the integer program of four axes does not fit in memory.
        small_state_share: share of all parameters below which state may stay whole under tensor parallelism: biases and
            scales are below it, matrices are not.
        most_uneven: times its share of the layers that a stage on a large cluster may have: 126 layers make 16 stages
            of at most 8. With 1.5 two of two drawn plans are the same, and LLaMA 70B on 4,096 A100 takes 1.28 of the
            work for the same plan.
        most_uneven_runs: likewise of a model without loops, whose products are dealt out. With 1.1 three of nine drawn
            steps on 512 to 4,096 devices take 12 to 34% longer, the others as long in 0.92 to 1.00 of the work.
    """

    most_stages_of_few: int = 4
    most_slicings: int = 250
    most_microbatches_per_stage: int = 16
    layers_per_stage: int = 4
    most_layers: int = 32
    most_mesh_axes: int = 3
    small_state_share: float = 1e-3
    most_uneven: float = 1.1
    most_uneven_runs: float = 1.5


@dataclass(frozen=True)
class EffortPolicy:
    """When the search stops, and below what gain or cost it tries no more.

    Args:
        gap: share of a step that a piece of work must be able to win to be done: a region, by its relaxation, of the
            fastest plan's; a better estimate, by its bound; another recomputation, or other copies, of what the memory
            limit costs; stages planned exactly, of what relaxations of them say.
        large_gap: likewise once ``large_work`` is spent: pipelines that could save less of a step of LLaMA 8B took 25
            times as long to plan as the plan that beats them, of one stage. Other meshes are tried only
            where they may win as much: for experts on two nodes, 1.5% above their bound, that takes 22% more work, for
            the same plan.
        large_work: work units (`autopar.search.clock`) from which on ``large_gap`` holds: five seconds of a core. Until
            then the spread of a relaxation that no plan has corrected yet counts by the share that is left: small steps
            on two devices and on four lost 2 and 6% to stages that an estimate had at 0.99 and 0.98 of one stage.
        price: share of a step that must be won for planning to take twice as long: other numbers of stages of GPT 39B
            might save 19% by their estimates, less their spread, and take as long as all before. They save nothing.
        sharding_share: share of ``gap`` at which the sharding of a mesh is done. At all of it a residual net on 32
            devices is planned 5.3% slower, for of a sum within 1% less may hide; at a tenth no slower.
        least_gain: share of a step that another schedule, form of plan, or threshold of joining must save to be taken:
            it is below what predictions err by. With half of it eight of eight drawn plans are the same, with twice one
            takes 2.9% longer.
        least_part: share of a step's time, by what is computed, of the operators for which it is planned in one more
            way: those of a dim that is padded, branches besides the dearest one (of a forward pass; two projections of
            one attention layer of a deep model are below it). With half and with twice two of two drawn plans with
            padding, and eight of eight with branches, are the same.
        budget: work units after which the search ends as soon as a plan is known; None for any number. By default a
            hundred seconds of a core.
        bound_ratio: times its bound that a plan of a region of which nothing else is known is expected to take, so that
            others are taken up before. Of LLaMA 8B on 32 H100 pipelines take 1.05 to 1.45 times what they compute. With
            1 a recurrent net on four T4 takes 1.62 of the work for the same plan, sixteen others as much as with 1.1.
        mesh_spread: share by which the plan of one stage may take less than its relaxation without a memory limit, in
            the first form that may fit: of LLaMA 8B on 32 H100 another form, with updates in the backward loop, takes
            4.4% less.
        step_spread: share by which plans of one search differ in how many times they take of what a relaxation of the
            whole step on the devices of one stage says. In 15 regions of drawn problems (`benchmarks drawn` has the
            ratios of each run) plans took 0.89 to 2.1 times as long, the median 1.12; eight with two stages on each
            worker 1.00 to 1.29 times, the median 1.07. In one search such ratios were 0.87 and 1.34: a spread of 0.2
            lost a third of that step, with 0.35 others take half as much work again for the same plan.
    """

    gap: float = 0.01
    large_gap: float = 0.03
    large_work: int = 500_000_000
    price: float = 0.3
    sharding_share: float = 0.1
    least_gain: float = 0.005
    least_part: float = 0.05
    budget: int | None = 10_000_000_000
    bound_ratio: float = 1.1
    mesh_spread: float = 0.1
    step_spread: float = 0.25

    def gap_after(self, work: int) -> float:
        """The gap after so many work units."""
        return self.large_gap if work >= self.large_work else self.gap

    def spent(self, work: int) -> float:
        """Share of ``large_work`` that is spent, at most 1."""
        return min(1.0, work / self.large_work) if self.large_work else 1.0

    def after(self, work: int) -> EffortPolicy:
        """Effort of a piece of work after so many work units."""
        return replace(self, gap=self.gap_after(work))

    @property
    def estimate_gap(self) -> float:
        """Relative gap between cost and bound at which a sharding is done that is an estimate, or is improved."""
        return max(self.gap, PLAN_GAP)

    @property
    def sharding_gap(self) -> float:
        """Relative gap between cost and bound at which the sharding of a mesh is done."""
        return max(self.sharding_share * self.gap, PLAN_GAP)


@dataclass(frozen=True)
class AttentionPolicy:
    """Which attention is planned in blocks next to the plain form.

    Args:
        least_scores: scores of one head from which it is: above 8192 tokens that ask 8192, where scores of a head are
            larger than all else of it; each such step is planned twice.
    """

    least_scores: int = (1 << 26) + 1


@dataclass(frozen=True)
class AlgebraPolicy:
    """Which products are computed in another order.

    Args:
        least_gain: share of the price of what differs that must be saved: bytes are counted as if a compiler fused
            nothing, so that what is about equal stays as the program says. With half and with twice two of two drawn
            plans are the same.
    """

    least_gain: float = 0.1


@dataclass(frozen=True)
class PaddingPolicy:
    """Which dims that the devices do not divide are planned with padding next to the plan without.

    Args:
        most_waste: padding as a share of the size, at most: 12 heads on 8 devices are 16. With half and with twice
            eight of eight drawn plans are the same, for 0.92 and 1.00 of the work.
        most_classes: classes of dims that are padded, those of the largest parts. With 1 and with 6 two of two drawn
            plans are the same, for 0.77 and 1.41 of the work; with 1 a residual net on four T4 takes 3.7% longer.
    """

    most_waste: float = 0.34
    most_classes: int = 3


@dataclass(frozen=True)
class PartitionPolicy:
    """Which answers of the dynamic program are planned exactly.

    Args:
        multiples: of the memory, rising, that layers as they are priced may take: the first from 1 on with some
            slicing, for priced without a limit they take more than planned within one; all, where none of these
            slicings fits once it is planned. With half and with twice as many steps eight layers of LLaMA 70B on 16 T4,
            where memory is short, have the same plan in the same work.
        near_best: factor of the least estimate within which candidates are planned exactly, and of the fastest plan
            within which plans of other kinds are compiled where a compiler decides.
        most_near: candidates within ``near_best`` that are planned, or compiled, and on a large cluster numbers of
            microbatches of each number of stages: seconds against errors of estimates. With 1 and with 6 two of two
            drawn plans are the same, for 0.95 and 1.00 of the work.
        most_other: candidates planned where none of the least estimates fits. With half and with twice that LLaMA has
            the same plan in the same work.
    """

    multiples: tuple[float, ...] = (
        0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0, math.inf,
    )  # fmt: skip
    near_best: float = 1.25
    most_near: int = 3
    most_other: int = 8


@dataclass(frozen=True)
class StagePolicy:
    """How one stage is planned.

    Args:
        limit_attempts: memory limits that a stage, the stages of a worker, or a step whose compiled program needs more
            are planned within before they are given up: what is known only from the plan (gradients that are added), or
            from the program, comes off the next limit. With 2 and with 6 four of four drawn plans are the same.
    """

    limit_attempts: int = 3


@dataclass(frozen=True)
class SchedulePolicy:
    """Which schedule a pipeline runs where that is free.

    Args:
        one_stage_per_worker: schedules that are timed with the stages planned for 1F1B. GPipe is never faster than 1F1B
            and holds more.
        two_stages_per_worker: schedules of two stages on each worker that are planned.
        ranked_chunks: stages on each worker of interleaved schedules that are ranked on more than 16 nodes: four have
            a quarter of the bubble, two half of it where layers are too few for four; more have launches and messages.
        token_units: equal parts of a sequence of which slices of tokens have whole numbers.
    """

    one_stage_per_worker: tuple[str, ...] = ("zb-h1", "zb-h2", "eager-1f1b")
    two_stages_per_worker: tuple[str, ...] = ("zb-v", "interleaved")
    ranked_chunks: tuple[int, ...] = (2, 4)
    token_units: int = 32


@dataclass(frozen=True)
class BranchPolicy:
    """Which independent branches of a model are planned side by side.

    Args:
        most_branches: branches that are put on workers in every way; of more the smallest ones stay together.
        most_candidates: ways of putting branches on parts of the devices that are planned, those of the least
            estimates. With half and with twice three of three drawn plans are the same, for 0.94 and 1.09 of the work.
    """

    most_branches: int = 6
    most_candidates: int = 6


@dataclass(frozen=True)
class CompilationPolicy:
    """How often a program that needs more memory than its plan says is planned again.

    Args:
        margin: share of the limit that a new plan aims at, after scaling by what was measured, which is not quite the
            same of another plan.
        tolerance: times the limit that a program may need, with a note; compilers needed 0.95 to 1.5 times the bytes of
            the model.
    """

    margin: float = 0.98
    tolerance: float = 1.1


@dataclass(frozen=True)
class SearchPolicy:
    """All thresholds of the search, by what they are about; see each.

    Args:
        in_second_process: whether a second process plans too, which takes a second to start; None for steps that are
            not small. Plans do not depend on it.
    """

    effort: EffortPolicy = EffortPolicy()
    sizes: SizePolicy = SizePolicy()
    enumeration: EnumerationPolicy = EnumerationPolicy()
    overlap: OverlapPolicy = field(default_factory=OverlapPolicy)
    attention: AttentionPolicy = AttentionPolicy()
    algebra: AlgebraPolicy = AlgebraPolicy()
    padding: PaddingPolicy = PaddingPolicy()
    partition: PartitionPolicy = PartitionPolicy()
    stages: StagePolicy = StagePolicy()
    schedules: SchedulePolicy = SchedulePolicy()
    branches: BranchPolicy = BranchPolicy()
    compilation: CompilationPolicy = CompilationPolicy()
    in_second_process: bool | None = None


#: Words of `autopar.parallelize`, the least effort first.
EFFORTS = ("quick", "default", "high", "exhaustive")

_POLICIES: Mapping[str, EffortPolicy] = MappingProxyType(
    {
        "quick": EffortPolicy(gap=0.05, large_gap=0.1, large_work=100_000_000, budget=500_000_000),
        "high": EffortPolicy(gap=0.002, large_gap=0.01, large_work=10_000_000_000, budget=100_000_000_000),
        "exhaustive": EffortPolicy(gap=0.0, large_gap=0.0, large_work=2**62, budget=None),
    }
)


def with_effort(policy: SearchPolicy, effort: str) -> SearchPolicy:
    """Thresholds of an effort.

    Args:
        policy: those of "default"; others of its thresholds stay, but for "exhaustive" (see `without_estimates`).
        effort: one of `EFFORTS`.
    """
    of_word = replace(policy, effort=_POLICIES.get(effort, policy.effort))
    return without_estimates(of_word) if effort == "exhaustive" else of_word


def without_estimates(policy: SearchPolicy) -> SearchPolicy:
    """Thresholds with which no estimate leaves out what may be planned, for models of a dozen layers on a node or two.

    Of one stage every number of microbatches with every level of recomputation is planned, and of pipelines every
    slicing where there are at most 2,000, else the best slicing of each pair of stages and microbatches. It is what the
    default is tested against, and takes minutes where that takes seconds.

    Args:
        policy: thresholds of which others stay as they are.
    """
    every = 10**9
    return replace(
        policy,
        effort=replace(
            policy.effort,
            gap=0.0,
            large_gap=0.0,
            least_gain=0.0,
            least_part=0.01,
            budget=None,
        ),
        sizes=replace(policy.sizes, tiny_operators=every, few_operators=every, small_operators=every),
        enumeration=replace(policy.enumeration, most_slicings=2_000),
        overlap=OverlapPolicy(
            (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.1, 0.5), stall_share=0.0, most_ruled_out=every
        ),
        partition=replace(policy.partition, near_best=4.0, most_near=every, most_other=64),
        stages=replace(policy.stages, limit_attempts=8),
        branches=replace(policy.branches, most_candidates=every),
    )
