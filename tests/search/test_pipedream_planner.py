"""PipeDream's planner on the profiles that its authors published."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import autopar
from autopar.search.pipeline.candidates import schedule_of
from autopar.search.research.slicings import LayerProfile, microbatches_an_update, slowest_least
from examples import mlp
from tests.search.problems import problem_of, toy

PROFILES = Path(__file__).parents[2] / "benchmarks" / "published" / "data" / "pipedream_chain_profiles.csv"

#: Bandwidth between the machines of the paper's clusters A and B, in bytes a second.
CLUSTERS = {"A": 25e9 / 8, "B": 10e9 / 8}


def profile_of(model, bandwidth):
    with PROFILES.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == model]
    columns = [np.array([float(r[c]) for r in rows]) for c in ("passes_ms", "sent_bytes", "parameter_bytes")]
    return LayerProfile(columns[0] / 1e3, columns[1], columns[2], bandwidth)


def planned(model, bandwidth, devices):
    """(replicas of the stages, seconds of the slowest stage, seconds of data parallel)."""
    profile, sizes = profile_of(model, bandwidth), range(1, devices + 1)
    alone, _ = slowest_least(profile, sizes, devices, 1)
    slowest, stages = slowest_least(profile, sizes, devices, None)
    return "-".join(str(sizes[s.kind]) for s in stages) if slowest < alone else "data parallel", slowest, alone


@pytest.mark.parametrize(
    ("model", "cluster", "want"),
    [
        ("vgg16", "A", "7-1"),
        ("vgg16", "B", "7-1"),
        ("inception_v3", "A", "data parallel"),
        ("inception_v3", "B", "7-1"),
    ],
)
def test_published_partitions_on_eight_devices(model, cluster, want):
    """Narayanan et al. (SOSP'19), table 1 and its preprint, arXiv 1806.03377: VGG16 and Inception-v3."""
    assert planned(model, CLUSTERS[cluster], 8)[0] == want


@pytest.mark.slow
def test_speedups_are_ordered_as_published():
    """Over data parallel on 8 devices: VGG16 5.12 (B) and 2.99 (A), Inception-v3 1.45 (B) and 1 (A)."""
    gains = []
    for model, cluster in [("vgg16", "B"), ("vgg16", "A"), ("inception_v3", "B"), ("inception_v3", "A")]:
        _, slowest, alone = planned(model, CLUSTERS[cluster], 8)
        gains.append(alone / min(slowest, alone))
    assert gains == sorted(gains, reverse=True) and gains[-1] == 1


@pytest.mark.parametrize(
    ("schedule", "want"), [("1f1b", 8), ("2bw", 8), ("auto", 8), ("pipedream", 1), ("pipedream-vertical", 1)]
)
def test_gradients_are_summed_once_an_update(schedule, want):
    fn, args = mlp.build(abstract=True)
    problem = problem_of(fn, args, toy(8), schedule=schedule, num_stages=2, num_microbatches=8)
    assert microbatches_an_update(problem, 8) == want
    assert isinstance(schedule_of(problem), autopar.schedule.Schedule)
