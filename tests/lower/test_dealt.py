"""Independent factorizations of many parameters are split over the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same

SIDE = 64


def params(count):
    rng = np.random.default_rng(3)
    return {f"w{i}": rng.standard_normal((SIDE, SIDE), np.float32) for i in range(count)}


def shampoo(p, x):
    """Each gradient between inverse fourth roots of its second moments (Gupta et al., 2018)."""

    def root(m):
        values, vectors = jnp.linalg.eigh(m + jnp.eye(len(m)))
        return (vectors * values**-0.25) @ vectors.T

    loss, grads = jax.value_and_grad(lambda p: sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in p.values()))(p)
    return jax.tree.map(lambda w, g: w - root(g @ g.T) @ g @ root(g.T @ g), p, grads), loss


def muon_by_qr(p, x):
    loss, grads = jax.value_and_grad(lambda p: sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in p.values()))(p)
    return jax.tree.map(lambda w, g: w - 0.1 * jnp.linalg.qr(w + g)[0] @ jnp.linalg.qr(g)[1], p, grads), loss


@pytest.mark.parametrize(("step", "primitive", "count"), [(shampoo, "eigh", 3), (muon_by_qr, "qr", 5)])
def test_each_device_factorizes_its_share(step, primitive, count):
    x = np.random.default_rng(4).standard_normal((16, SIDE), np.float32)
    run = autopar.parallelize(step, num_stages=1, num_microbatches=1, cluster=CLUSTER)
    plan = run.plan(params(count), x)
    records = [o for o in plan.content.operators if o.id.rpartition("/")[2].partition(".")[0] == primitive]
    (record,) = records  # all are independent
    assert not record.operands[0].startswith("[.")
    assert_trees_same(run(params(count), x), step(params(count), x))


def test_one_that_needs_another_is_not_stacked_with_it():
    def step(p, x):
        a = jnp.linalg.qr(p["w0"])[0]
        b = jnp.linalg.qr(a @ p["w1"])[0]
        c = jnp.linalg.eigh(b @ b.T)[1]
        d = jnp.linalg.eigh(p["w1"] @ p["w1"].T)[1]
        e = jnp.linalg.qr(d)[0]
        return {"w0": p["w0"] - b @ c, "w1": p["w1"] - e}, x @ e

    x = np.ones((4, SIDE), np.float32)
    run = autopar.parallelize(step, num_stages=1, cluster=CLUSTER)
    assert_trees_same(run(params(2), x), jax.jit(step)(params(2), x), rtol=1e-4)
