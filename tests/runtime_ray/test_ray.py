"""Workers as processes on Ray. One Ray for the whole file: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import psutil
import pytest

from autopar.cluster import Cluster
from autopar.runtime.ray import RemotePipeline, RunOptions
from autopar.runtime.ray.cluster import RayCluster
from tests.runtime_ray.pipelines import Example, example, furthest, trained, trained_plain

pytest.importorskip("flatbuffers")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with Cluster.ray(workers=2, devices_per_worker=2) as made:
        yield made


@pytest.fixture(scope="module")
def mlp() -> Example:
    return example("mlp", 2, layers=2, hidden=16, batch=8)


def started(cluster: RayCluster, made: Example, **options: Any) -> RemotePipeline:
    pipeline = RemotePipeline(made.source, lambda h: cluster.launch(h, cluster.slots), RunOptions(**options))
    pipeline.load()
    return pipeline


@pytest.fixture(scope="module")
def pipeline(cluster: RayCluster, mlp: Example) -> Iterator[RemotePipeline]:
    made = started(cluster, mlp, deadline_s=60)
    yield made
    made.close()


def test_the_cluster_is_one_to_plan_with(cluster: RayCluster) -> None:
    assert cluster.num_nodes == 2
    assert cluster.num_devices == 4
    assert Cluster.from_json(cluster.to_json()).groups == cluster.groups


def test_training_is_that_of_one_device(mlp: Example, pipeline: RemotePipeline) -> None:
    assert furthest(trained(mlp, pipeline, 3), trained_plain(mlp, 3)) < 1e-5


def test_nothing_listens_on_other_than_loopback(pipeline: RemotePipeline) -> None:
    mine = psutil.Process()
    processes = [mine, *mine.children(recursive=True)]
    addresses = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert addresses
    assert {a.removeprefix("::ffff:") for a in addresses} <= {"127.0.0.1", "::1"}


@pytest.mark.slow
@pytest.mark.parametrize("table", ["gpipe", "1f1b"])
def test_training_gpt_is_that_of_one_device(cluster: RayCluster, pipeline: RemotePipeline, table: str) -> None:
    pipeline.close()  # its workers' places
    with jax.enable_x64(True):
        gpt = example("gpt", 2, microbatches=4, table=table, dtype="float64")
        own = started(cluster, gpt, deadline_s=60)
        try:
            assert furthest(trained(gpt, own, 3), trained_plain(gpt, 3)) < 1e-9
        finally:
            own.close()
