"""An exhaustive search is never slower than the default, and the default is near it, on drawn small problems."""

from __future__ import annotations

import math

import numpy as np
import pytest
from click.testing import CliRunner

import autopar
from autopar.api.options import ParallelOptions
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.search.exhaustive_policy import without_estimates
from autopar.search.policy import SearchPolicy
from examples import mlp
from tests.search.problems import toy

#: Times the step of the exhaustive search that the default may take.
NEAR = 1.05


def both(cluster: Cluster, **sizes: int) -> tuple[float, float]:
    """Seconds of a step by default and by exhaustive search."""
    fn, args = mlp.build(abstract=True, **sizes)
    default, whole = (
        autopar.parallelize(fn, cluster=cluster, donate_argnums=0, time_limit_s=limit_s).plan(*args)
        for limit_s in (None, math.inf)
    )
    assert whole.search.lower_bound <= whole.step_time
    return default.step_time, whole.step_time


def test_an_exhaustive_search_is_never_slower():
    default_s, whole_s = both(toy(2), layers=2, hidden=64, batch=8)
    assert whole_s <= default_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_default_is_near_an_exhaustive_search(seed: int):
    random = np.random.default_rng((20261, seed))
    cluster = toy(int(random.choice([2, 4])))
    sizes = {"layers": int(random.integers(3, 6)), "hidden": int(random.choice([32, 64, 128])), "batch": 16}
    default_s, whole_s = both(cluster, **sizes)
    assert whole_s <= default_s * (1 + 1e-9)
    assert default_s <= NEAR * whole_s


def test_only_thresholds_of_effort_differ():
    policy = without_estimates(SearchPolicy())
    assert policy.pricing == SearchPolicy().pricing and policy.sizes.large_nodes == SearchPolicy().sizes.large_nodes
    assert policy.enumeration.most_slicings > SearchPolicy().enumeration.most_slicings


def test_exhaustive_is_a_truth_value():
    with pytest.raises(AutoparError, match="neither True nor False"):
        ParallelOptions(exhaustive=3)


def test_the_command_line_knows_it():
    assert "--exhaustive" in CliRunner().invoke(main, ["plan", "--help"]).output
