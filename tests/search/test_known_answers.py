"""On a toy cluster the search finds what experts write by hand."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar import parallelize
from autopar.ir import Layout
from autopar.search.intra import build
from autopar.solver import solve
from examples import llama
from tests.search.problems import f32, i32, problem_of, toy


def sgd(loss):
    """A train step of plain gradient descent."""

    def train_step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def blocks_loss(params, x):
    """Residual blocks of two matrix products."""
    for w, v in params:
        x = x + jax.nn.relu(x @ w) @ v
    return jnp.mean(x * x)


def blocks(count, hidden, ffn):
    return [(f32(hidden, ffn), f32(ffn, hidden)) for _ in range(count)]


def layouts(plan):
    return {i.path: i.layout for i in plan.content.inputs}


def large(plan, bytes):
    """(kind, bytes) -> count of collectives of at least ``bytes``."""
    found = Counter()
    for c in plan.communication:
        if c.bytes >= bytes:
            found[c.kind, c.bytes] += c.count
    return found


def traffic(plan, bytes):
    """Bytes of collectives of at least ``bytes``, in units of an all-gather: an all-reduce counts twice."""
    return sum(c.count * c.bytes * (2 if c.kind == "all-reduce" else 1) for c in plan.communication if c.bytes >= bytes)


def test_data_parallel_for_large_batches():
    plan = parallelize(sgd(blocks_loss), cluster=toy(8), mesh_shape=(8,)).plan(blocks(2, 16, 32), f32(8192, 16))
    assert layouts(plan)["batch"] == "[x,.]"
    weights = 2 * 2 * 16 * 32 * 4
    assert traffic(plan, 64) <= 2 * weights  # gradients once
    assert plan.content.search.sharding_bound == pytest.approx(plan.search.objective)


def test_megatron_for_large_weights():
    """Column then row: each block needs one all-reduce of its output forward and one backward.

    The first block's input needs no gradient, so that there are two forward and one backward.
    """
    batch, hidden, ffn = 8, 256, 1024
    args = blocks(2, hidden, ffn), f32(batch, hidden)
    plan = parallelize(sgd(blocks_loss), cluster=toy(8), mesh_shape=(8,)).plan(*args)
    found = layouts(plan)
    for block in range(2):
        assert found[f"params[{block}][0]"] == "[.,x]"
        assert found[f"params[{block}][1]"] == "[x,.]"
    activation = batch * hidden * 4
    assert traffic(plan, 64) == 2 * 3 * activation
    if set(k for k, _ in large(plan, 64)) == {"all-reduce"}:
        assert large(plan, 64) == {("all-reduce", activation): 3}


def test_one_all_reduce_a_pass_of_a_two_layer_network():
    """Forward one, of which a result that may stay split needs half; backward one for the input's gradient."""

    def forward(params, x):
        (w, v) = params
        return jnp.tanh(jnp.tanh(x @ w) @ v)

    def both(params, x):
        y, pull = jax.vjp(forward, params, x)
        grads, dx = pull(y)
        return jax.tree.map(lambda p, g: p - g, params, grads), jnp.tanh(dx)

    (params,) = blocks(1, 256, 1024)
    x = f32(4, 256)  # so few examples that the devices do not divide them
    activation = 4 * 256 * 4
    for fn, passes in ((forward, 0.5), (both, 2)):
        plan = parallelize(fn, cluster=toy(8, latency_s=1e-6), mesh_shape=(8,)).plan(params, x)
        assert traffic(plan, 64) == 2 * passes * activation, plan.communication
        assert layouts(plan)["params[0]"] == "[.,x]"
        assert layouts(plan)["params[1]"] == "[x,.]"


def test_vocabulary_parallel_embedding():
    """A table that is the output projection too is split by words: activations and sums of the softmax are sent."""
    vocab, hidden, tokens = 8192, 32, 16

    def loss(table, batch):
        x = jnp.tanh(table[batch["tokens"]])
        logits = x @ table.T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1)
        return -jnp.mean(chosen)

    args = f32(vocab, hidden), {"tokens": i32(tokens), "labels": i32(tokens)}
    plan = parallelize(sgd(loss), cluster=toy(8), mesh_shape=(8,)).plan(*args)
    assert layouts(plan)["params"] == "[x,.]"
    assert max(c.bytes for c in plan.communication) <= tokens * hidden * 4
    assert not any(c.kind in ("all-gather", "all-to-all") and c.bytes > tokens * hidden * 4 for c in plan.communication)


def test_both_axes():
    """Batch and weights both large: one axis splits examples, the other weights."""
    batch, hidden, ffn = 512, 256, 512
    args = blocks(2, hidden, ffn), f32(batch, hidden)
    plan = parallelize(sgd(blocks_loss), cluster=toy(8), mesh_shape=(2, 4)).plan(*args)
    found = {k: Layout.parse(v) for k, v in layouts(plan).items()}
    (data,) = found["batch"].dims[0]
    for block in range(2):
        w, v = found[f"params[{block}][0]"], found[f"params[{block}][1]"]
        assert set(w.dims[1]) == set(v.dims[0]) == {"x", "y"} - {data}
    alone = [
        parallelize(sgd(blocks_loss), cluster=toy(8), mesh_shape=(8,), search=s).plan(*args).step_time
        for s in ("alpa", "data-parallel")
    ]
    assert plan.step_time < min(alone)


@pytest.mark.slow
def test_the_best_mesh_is_chosen():
    args = blocks(2, 256, 512), f32(512, 256)
    train_step = sgd(blocks_loss)
    best = parallelize(train_step, cluster=toy(8)).plan(*args)
    shapes = [(8,), (2, 4)]
    times = {s: parallelize(train_step, cluster=toy(8), mesh_shape=s).plan(*args).search.objective for s in shapes}
    assert best.search.objective == pytest.approx(min(times.values()), rel=1e-9)
    assert tuple(best.stages[0].mesh_shape.values()) == min(times, key=times.get)
    assert {c.name for c in best.search.considered} == {"mesh 8", "mesh 2x4"}


def llama_problem(**overrides):
    fn, args = llama.build(abstract=True, hidden=32, heads=4, kv_heads=4, vocab=64, seq=8, **overrides)
    cluster = toy(4)
    problem = problem_of(fn, args, cluster)
    (mesh,) = cluster.logical_meshes((4,))
    return build(problem, mesh)


@pytest.mark.slow
def test_scanned_layers_cost_what_unrolled_ones_cost():
    costs = [solve(llama_problem(layers=3, unroll=unroll).problem).objective for unroll in (False, True)]
    assert costs[0] == pytest.approx(costs[1], rel=0.02)


@pytest.mark.slow
def test_a_scan_has_as_many_choices_however_long():
    few, many = llama_problem(layers=2), llama_problem(layers=12)
    assert len(many.problem.nodes) == len(few.problem.nodes)
    assert len(many.problem.edges) == len(few.problem.edges)
    unrolled = llama_problem(layers=3, unroll=True)
    assert len(unrolled.problem.nodes) > len(few.problem.nodes)


@pytest.mark.slow
def test_a_deeper_network_costs_more_in_proportion():
    train_step = sgd(blocks_loss)
    times = {
        n: parallelize(train_step, cluster=toy(8), mesh_shape=(8,)).plan(blocks(n, 256, 1024), f32(8, 256)).step_time
        for n in (2, 4, 8)
    }
    assert times[8] - times[4] == pytest.approx(2 * (times[4] - times[2]), rel=1e-6)


@pytest.mark.parametrize("name", ["data-parallel", "zero1", "zero3", "replicated"])
def test_numbers_of_the_batch_are_whole(name):
    """Also of a step, or of a stage, that has nothing else of the batch."""

    def step(w, b):
        return w * 0.9, jnp.sin(b["scale"]) * jnp.cos(b["scale"])

    plan = parallelize(step, cluster=toy(4), search=name, batch_argnums=1).plan(f32(4), {"scale": f32()})
    assert not any(plan.partition_specs()[1]["scale"])


@pytest.mark.parametrize("name", ["data-parallel", "zero1", "zero3", "megatron", "replicated"])
def test_one_device_has_all_of_a_batch(name):
    """Labels are compared with numbers of no example: on one device both are whole."""

    def loss(w, b):
        of_label = b["labels"][..., None] == jnp.arange(24)
        return -(jax.nn.log_softmax(b["x"] @ w) * of_label).sum(-1).mean()

    batch = {"x": f32(4, 6, 16), "labels": i32(4, 6)}
    plan = parallelize(sgd(loss), cluster=toy(1), search=name, batch_argnums=1).plan(f32(16, 24), batch)
    assert plan.num_stages == 1 and plan.communication == ()


@pytest.mark.parametrize("name", ["megatron", "fsdp-tp"])
def test_grids_that_do_not_hold_a_constraint_are_left_out(name):
    """Four parts of the columns: on 8 x 1 and 1 x 8 devices there are none."""

    def loss(w, b):
        return ((b["x"] @ w) ** 2).mean()

    by_hand = {"constraints": {"params": P(None, "model")}, "mesh_axes": {"model": 4}}
    fn = parallelize(sgd(loss), cluster=toy(8), search=name, batch_argnums=1, **by_hand)
    plan = fn.plan(f32(16, 32), {"x": f32(16, 16)})
    assert sorted(plan.stages[0].mesh_shape.values()) == [2, 4]
