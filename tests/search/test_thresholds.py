"""Bytes up to which collectives are sent as one: chosen by the schedule of the step, and told to XLA for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import Cluster
from autopar._compat.meshes import abstract_mesh
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.aot import parse_target
from autopar.lower.program import lower_on
from autopar.plan import CombinedBytes, StepForm
from autopar.search import restrict, strategy_named
from autopar.search.intra import ShardingProblem, extract
from autopar.search.intra.collectives import Thresholds
from autopar.search.intra.extract import Sharding
from autopar.search.intra.overlap import StepSchedules
from autopar.search.intra.thresholds import with_thresholds
from autopar.search.policy import EffortPolicy
from autopar.search.problem import Problem
from benchmarks.fixed_plans import perceptron
from examples import gpt
from tests.search.problems import problem_of

LEAST = EffortPolicy().least_gain


def cluster(nodes: int, latency_s: float) -> Cluster:
    """Nodes of A100 whose links have another latency."""
    known = Cluster.load("dgx-a100", nodes=nodes)
    groups = tuple(
        replace(g, intra=replace(g.intra, latency_s=latency_s), inter=replace(g.inter, latency_s=latency_s))
        for g in known.groups
    )
    return replace(known, groups=groups)


def plans(strategy: str, nodes: int, latency_s: float, layers: int, width: int, batch: int):
    """Those of a perceptron with the compiler's own thresholds, and with the best."""
    step, args = perceptron(*[width] * (layers + 1), batch=batch)
    problem = problem_of(step, args, cluster(nodes, latency_s))
    plain = strategy_named(strategy)(problem)
    with mock.patch.object(restrict, "extract", _joined):
        return plain, strategy_named(strategy)(problem)


def _joined(problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int]) -> Sharding:
    """A sharding whose collectives are joined by the best thresholds; plans that people name have the compiler's."""
    return with_thresholds(problem, sharding_problem, choice, extract(problem, sharding_problem, choice))


def test_schedules_of_one_threshold_say_nothing_of_the_next() -> None:
    """Those of a loop change with its messages, and with them the step around it, whose own messages stay the same."""
    step, args = gpt.build("tiny", abstract=True, scan=True, batch=64)
    problem, seen = problem_of(step, args, cluster(2, 1e-5)), []

    def noted(*of: Any) -> Sharding:
        seen.append((of, extract(*of)))
        return seen[-1][1]

    with mock.patch.object(restrict, "extract", noted):
        strategy_named("zero3")(problem)
    (problem, sharding_problem, choice, *_), sharding = seen[-1]
    of = (problem.cost_model, sharding_problem, choice, sharding.sent)
    kept, loops_s = StepSchedules(*of), set()
    for bytes in (0.0, *(2.0**n for n in range(8, 31)), 0.0):
        thresholds = Thresholds(bytes, bytes)
        assert kept.timed(thresholds) == StepSchedules(*of).timed(thresholds)
        loops_s.add(tuple(s.timing.seconds for region, s in kept.of(thresholds).items() if region))
    assert len(loops_s) > 1


@settings(max_examples=12)
@given(
    st.sampled_from(["data-parallel", "zero1", "zero3"]),
    st.integers(1, 2),
    st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4]),
    st.integers(2, 10),
    st.sampled_from([256, 1024, 2048]),
    st.sampled_from([64, 1024]),
)
def test_a_threshold_is_named_where_the_step_is_shorter_by_it(strategy, nodes, latency_s, layers, width, batch):
    plain, best = plans(strategy, nodes, latency_s, layers, width, batch)
    own = plain.stages[0]
    assert own.thresholds is None
    stage = best.stages[0]
    if stage.thresholds is None:
        assert best.step_time == plain.step_time
    else:
        assert best.step_time <= (1 - LEAST) * plain.step_time
        assert any("sent together up to" in note for note in best.content.notes)
    assert best.search.lower_bound <= best.step_time


def test_where_latency_counts_more_is_sent_as_one():
    """Of twelve gradients of 4 MB the compiler's own 31 MB join seven: fewer pay with 10 us, more with 100 us."""
    _, quick = plans("data-parallel", 2, 1e-5, 12, 1024, 65536)
    own, slow = plans("data-parallel", 2, 1e-4, 12, 1024, 65536)
    assert quick.stages[0].thresholds.sums < 31_457_280 < slow.stages[0].thresholds.sums
    assert slow.step_time < 0.96 * own.step_time
    assert slow.content.in_form(StepForm(4)).stages[0].thresholds == slow.stages[0].thresholds
    assert autopar.Plan.from_json(slow.to_json()) == slow


@pytest.mark.parametrize(("platform", "told"), [("cuda", True), ("gpu", True), ("cpu", False), ("tpu", False)])
def test_compilers_for_gpus_are_asked(platform, told):
    step, args = perceptron(64, 64, 64)
    signature, _ = flatten_call(step, args, {}, SignatureOptions())
    traced = trace(step, signature)
    plan = autopar.parallelize(step, cluster=Cluster.load("dgx-a100"), num_stages=1).plan(*args)
    (stage,) = plan.stages
    content = msgspec.structs.replace(
        plan.content, stages=(msgspec.structs.replace(stage, thresholds=CombinedBytes(1 << 20, 1 << 21)),)
    )
    plan = replace(plan, content=content)
    options = lower_on(traced, plan, abstract_mesh(plan.stages[0].mesh_axes), platform).compiler_options
    wanted = {
        "xla_gpu_all_reduce_combine_threshold_bytes": "1048576",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "1048576",
        "xla_gpu_all_gather_combine_threshold_bytes": "2097152",
    }
    assert {k: v for k, v in options.items() if k.startswith("xla_gpu")} == (wanted if told else {})


@pytest.mark.slow
@pytest.mark.parametrize("joined", [1, 2, 4, 12])
def test_compiled_programs_send_as_many_sums_as_the_threshold_leaves(joined):
    """Of twelve gradients of 1 MB the compiler for GPUs joins ``joined`` at a time."""
    target = "cuda:h100:1x8"
    if any(find_spec(name.partition(".")[0]) is None for name in parse_target(target).needs):
        pytest.skip(f"there is no compiler for {target}")
    step, args = perceptron(*[512] * 13, batch=4096)
    parallel = autopar.parallelize(
        step, cluster=parse_target(target).cluster(), search="data-parallel", num_microbatches=1
    )
    plan = parallel.plan(*args)
    (stage,) = plan.stages
    content = msgspec.structs.replace(
        plan.content, stages=(msgspec.structs.replace(stage, thresholds=CombinedBytes(joined << 20, 0)),)
    )
    compiled = autopar.verify(replace(plan, content=content), parallel, *args, target=target)
    text = compiled.hlo
    sums = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    assert sums == 12 // joined
