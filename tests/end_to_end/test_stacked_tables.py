"""Embedding tables of one array are dealt out whole to devices by the planner, without a transform."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from benchmarks.family_bytes import CLUSTER
from tests.search.problems import toy

Tables = tuple[int, int, int, int, int]


def step_of(case: Tables, stacked: bool) -> tuple[Any, Any]:
    """A step over (tables, rows, width, batch, members of a bag), and its arguments."""
    tables, rows, width, batch, members = case
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(0.1 * rng.standard_normal(shape))

    def loss(p: Any, ids: Any, y: jax.Array) -> jax.Array:
        if stacked:
            bags = jnp.moveaxis(jax.vmap(lambda table, at: table[at])(p["tables"], ids).sum(2), 0, 1)
        else:
            bags = jnp.stack([table[at].sum(1) for table, at in zip(p["tables"], ids, strict=True)], 1)
        return ((jax.nn.relu(bags.reshape(batch, -1) @ p["in"]) @ p["out"] - y) ** 2).mean()

    def step(p: Any, ids: Any, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, ids, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    all_rows = floats(tables, rows, width)
    ids = jnp.asarray(rng.integers(0, rows, (tables, batch, members)))
    p = {"tables": all_rows if stacked else list(all_rows), "in": floats(tables * width, 64), "out": floats(64)}
    return step, (p, ids if stacked else list(ids), floats(batch))


def planned(case: Tables, stacked: bool) -> autopar.Plan:
    step, args = step_of(case, stacked)
    return autopar.parallelize(step, cluster=CLUSTER, num_stages=1, num_microbatches=1).plan(*args)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [(8, 1024, 32, 512, 1), (16, 2048, 16, 256, 2), (32, 512, 16, 512, 1)])
def test_tables_of_one_array_lie_whole_on_devices(case: Tables) -> None:
    """A device has some of the tables, whole; nothing as large as they are is sent, and tables apart are slower."""
    plan = planned(case, True)
    (params, _, _) = plan.partition_specs()
    tables, rows, width = case[:3]
    (axes,) = params["tables"]
    pieces = math.prod(plan.stages[0].mesh_shape[a] for a in ((axes,) if isinstance(axes, str) else axes))
    assert pieces >= 4
    assert max(c.bytes for c in plan.communication) < 4 * tables * rows * width / pieces
    assert plan.step_time < 0.9 * planned(case, False).step_time


def test_values_are_those_of_one_device() -> None:
    with jax.enable_x64(True):
        step, args = step_of((8, 64, 8, 32, 2), True)
        got = autopar.parallelize(step, cluster=toy(8), num_stages=1, num_microbatches=1)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, jax.jit(step)(*args))
