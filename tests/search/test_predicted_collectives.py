"""The collectives that a plan predicts are those of the compiled program: kind, count and bytes."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, parallelize
from autopar.cost import wire_bytes
from autopar.lower.hlo import collectives
from autopar.search import Manual
from examples import llama, mlp
from tests.end_to_end.random_plans import random_plan
from tests.search.problems import f32, toy


def predicted(plan):
    """(kind, bytes, devices of a group) -> count a step."""
    sizes = plan.stages[0].mesh_shape
    found = Counter()
    for c in plan.communication:
        group = 1
        for axis in c.axis.split("+"):
            group *= sizes[axis]
        # A permutation has pairs instead of groups.
        found[c.kind, c.bytes, 2 if c.kind == "collective-permute" else group] += c.count
    return found


def compiled(program):
    found = Counter()
    for c in collectives(program.as_text()):
        assert c.exact
        found[c.kind, c.full_bytes, c.group_size] += c.times
    return found


def assert_predicted(fn, args, **options):
    """The same collectives; gives them."""
    options = {"cluster": toy(8), "mesh_shape": (8,), **options}
    program = parallelize(fn, **options).compile(*args)
    want = predicted(program.plan)
    assert compiled(program) == want
    return want


def loss(params, x):
    w, v = params
    return jnp.mean((jnp.tanh(x @ w) @ v) ** 2)


def train_step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def scanned(params, x):
    def body(c, w):
        return jnp.tanh(jnp.tanh(c @ w) @ w.T), None

    return jax.lax.scan(body, x, params)[0]


CASES = {
    "data parallel": (train_step, ((f32(16, 32), f32(32, 16)), f32(2048, 16)), {}),
    "by hand": (train_step, ((f32(16, 32), f32(32, 16)), f32(64, 16)), {"search": "data-parallel"}),
    "whole": (train_step, ((f32(16, 32), f32(32, 16)), f32(64, 16)), {"search": "replicated"}),
    "megatron": (train_step, ((f32(256, 512), f32(512, 256)), f32(4, 256)), {}),
    "both axes": (train_step, ((f32(64, 256), f32(256, 64)), f32(128, 64)), {"mesh_shape": (2, 4)}),
    "scan": (scanned, (f32(5, 64, 256), f32(4, 64)), {}),
    "softmax": (lambda x, w: jax.nn.softmax(x @ w), (f32(4, 64), f32(64, 512)), {}),
    "norm": (lambda x: x / jnp.sqrt(jnp.sum(x * x)), (f32(4096, 64),), {}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_small_functions(name):
    fn, args, options = CASES[name]
    found = assert_predicted(fn, args, **options)
    assert found or name == "whole"


def test_collectives_in_a_loop_count_every_trip():
    found = assert_predicted(scanned, (f32(5, 64, 256), f32(4, 64)))
    assert any(count % 5 == 0 for count in found.values())


def assert_random_plan(seed, mesh_shape):
    """A senseless plan converts to and fro, some of which XLA sees through; it adds nothing."""
    args = (f32(16, 32), f32(32, 16)), f32(64, 16)
    search = random_plan(seed)
    program = parallelize(train_step, cluster=toy(8), mesh_shape=mesh_shape, search=search).compile(*args)
    found, want = compiled(program), predicted(program.plan)
    assert found and not found - want
    assert found.total() >= 0.75 * want.total()


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_random_plans(mesh_shape):
    assert_random_plan(0, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_an_example(mesh_shape):
    fn, args = mlp.build(abstract=True, layers=2, hidden=64, batch=256)
    assert_predicted(fn, args, mesh_shape=mesh_shape)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_a_scanned_model(mesh_shape):
    """XLA merges a few small collectives that two operators of a layer ask for."""
    fn, args = llama.build(abstract=True)
    program = parallelize(fn, cluster=toy(8), mesh_shape=mesh_shape).compile(*args)
    found, want = compiled(program), predicted(program.plan)
    assert not found - want
    assert sent(found) >= 0.95 * sent(want)


def sent(collectives):
    """Bytes that one device sends."""
    return sum(count * wire_bytes(kind, size, group) for (kind, size, group), count in collectives.items())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 41))
def test_many_random_plans(seed):
    assert_random_plan(seed, [(8,), (2, 4), (4, 2), (2, 2, 2)][seed % 4])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "halved"), [("tpu-v5e", 2), ("dgx-a100", 1)])
def test_tpus_send_what_products_alone_read_in_half_width(name, halved) -> None:
    def sent(precision):
        def step(params, x):
            with jax.default_matmul_precision(precision):
                return train_step(params, x)

        args = ((f32(256, 512), f32(512, 256)), f32(1024, 256))
        cluster = Cluster.load(name).part(0, 8)
        plan = parallelize(step, cluster=cluster, mesh_shape=(8,), search=Manual(dp=8, zero=3)).plan(*args)
        return plan.communication

    fast, precise = sent("default"), sent("highest")
    gathers = [sum(c.bytes * c.count for c in plan if c.kind == "all-gather") for plan in (fast, precise)]
    assert gathers[0] * halved == gathers[1] > 0
    # How many gradients are sums follows from prices; how wide they are sent does not.
    sums = [{c.bytes for c in plan if c.kind == "reduce-scatter"} for plan in (fast, precise)]
    assert sums[0] == sums[1] != set()
