"""Stages and steps of a pipeline are priced by what the problem says that things cost."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.cost.constants import load_constants
from autopar.search import Manual
from tests.search.inter.test_tiny_steps import problem
from tests.search.problems import toy


def test_a_part_of_the_cluster_keeps_all_that_was_given():
    cluster = Cluster.load("dgx-a100")
    given = load_constants()
    slower = msgspec.structs.replace(given, kernels=msgspec.structs.replace(given.kernels, memory_share=0.1))
    whole = CostModel(cluster, launch_s=1e-3, all_reduce="best", constants=slower)
    part = whole.on(cluster.part(0, 2))
    assert (part.launch_s, part.all_reduce, part.cluster.num_devices) == (1e-3, "best", 2)
    assert part.rates[0] is not None and part.rates[0].memory_share == 0.1
    assert part == CostModel(cluster.part(0, 2), launch_s=1e-3, all_reduce="best", constants=slower)


def test_stages_of_a_pipeline_start_operators_as_the_problem_says():
    made = problem(toy(4))
    slow = replace(made, cost_model=CostModel(made.cluster, launch_s=1.0))
    plain, started = (Manual(pp=2, dp=2)(p) for p in (made, slow))
    assert plain.step_time < 1.0
    for stage in started.stages:
        assert stage.step_time >= 4.0  # in each of four microbatches it starts something
    assert started.step_time >= 5.0  # four microbatches on two stages
