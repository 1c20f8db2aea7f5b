"""Transformers on Ray workers train to the values of one device."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from examples import gpt, llama, moe
from tests.runtime_ray.pipelines import furthest, numbers

pytest.importorskip("flatbuffers")

TEXT = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (gpt, {**TEXT, "dropout": 0.1, "clip": 1.0}),
    "llama": (llama, {**TEXT, "kv_heads": 2}),
    "moe": (moe, {}),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("workers", "hosts"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str, workers: int, hosts: int) -> None:
    module, sizes = MODELS[name]
    with (
        jax.enable_x64(True),
        autopar.Cluster.ray(workers=workers, devices_per_worker=2, hosts_per_stage=hosts) as cluster,
    ):
        fn, (state, batch) = module.build("tiny", dtype="float64", **sizes)
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=4, schedule="1f1b")
        compiled = step.compile(state, batch)
        assert compiled.plan.num_stages == workers // hosts
        assert compiled.local.runtime.driver.session.groups.sizes == (hosts,) * (workers // hosts)
        plain = jax.jit(fn)
        mine, want = step.shard(state, batch)[0], state
        for _ in range(3):
            mine, metrics = compiled(mine, batch)
            want, expected = plain(want, batch)
        got = jax.tree.leaves((mine, metrics))
        assert furthest(got, [numbers(x) for x in jax.tree.leaves((want, expected))]) < 1e-9
