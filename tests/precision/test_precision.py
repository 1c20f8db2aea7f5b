"""Mixed precision: what computes in which dtype, values against steps that cast by hand, bytes in plans."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir.phases import phase_of
from autopar.precision import DENIED, Precision, mixed
from examples import gpt, mlp, moe, wide_resnet
from tests.end_to_end.clusters import SLOW
from tests.precision.training import last_loss

BF16 = Precision("bf16")


def data(size=16, width=32, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((size, width)).astype(np.float32) for n in "xy"}


def weights(width=32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {n: jax.random.normal(k, (width, width)) / width**0.5 for n, k in zip("ab", keys, strict=True)}


def loss(p, d):
    hidden = jax.nn.relu(d["x"] @ p["a"])
    return jnp.mean((jax.nn.softmax(hidden @ p["b"]) - d["y"]) ** 2)


def sgd(p, d):
    value, grads = jax.value_and_grad(loss)(p, d)
    return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value


def graph_of(step, args, precision=BF16):
    signature, _ = flatten_call(step, args, {}, SignatureOptions())
    return trace(step, signature, rewrites=[lambda c, p: mixed(precision, c, p)]).graph


def dtypes(graph, primitive):
    """(types of the operands, type of the result) of operators, those inside loops too."""
    found = []
    for op in graph.operators:
        if op.primitive == primitive:
            found.append((tuple(t.dtype for t in graph.operand_types(op)), op.results[0].type.dtype))
        for _, region in op.regions:
            found += dtypes(region, primitive)
    return found


def parallel(step, **options):
    return autopar.parallelize(step, num_stages=1, num_microbatches=1, **options)


def test_products_are_narrow_and_gradients_are_not():
    graph = graph_of(sgd, (weights(), data()))
    products = dtypes(graph, "dot_general")
    assert [operands for operands, _ in products] == [("bf16", "bf16")] * 5
    # Forward and to the hidden values narrow; the logits go on to a maximum, and gradients to the update, in float32.
    assert sorted(result for _, result in products) == ["bf16"] * 2 + ["f32"] * 3
    for op in graph.operators:
        if phase_of(op) == "update":
            assert {t.dtype for t in graph.operand_types(op)} <= {"f32"}, op
    assert {o.type.dtype for o in graph.outputs} == {"f32"}


def test_what_is_denied_stays_wide():
    graph = graph_of(sgd, (weights(), data()))
    for primitive in ("exp", "reduce_sum", "reduce_max"):
        assert dtypes(graph, primitive) and {d for ops, r in dtypes(graph, primitive) for d in (*ops, r)} == {"f32"}
    assert ("bf16", "bf16") in {ops for ops, _ in dtypes(graph, "max")}  # relu


def test_the_table_is_the_users():
    wide = graph_of(sgd, (weights(), data()), Precision("bf16", deny=DENIED | {"max", "dot_general"}))
    assert {d for ops, r in dtypes(wide, "dot_general") + dtypes(wide, "max") for d in (*ops, r)} == {"f32"}

    def named(p, d):
        def inner(p, d):
            with jax.named_scope("head"):
                return jnp.mean((jax.nn.relu(d["x"] @ p["a"]) @ p["b"] - d["y"]) ** 2)

        return jax.tree.map(lambda w, g: w - g, p, jax.grad(inner)(p, d))

    kept = graph_of(named, (weights(), data()), Precision("bf16", deny_scopes=("head",)))
    assert {d for ops, r in dtypes(kept, "dot_general") for d in (*ops, r)} == {"f32"}


def test_a_product_whose_precision_is_asked_for_stays_wide():
    def step(p, d):
        def inner(p):
            return jnp.mean(jnp.dot(d["x"], p, precision="highest") ** 2)

        return p - jax.grad(inner)(p)

    graph = graph_of(step, (weights()["a"], data()))
    assert {d for ops, r in dtypes(graph, "dot_general") for d in (*ops, r)} == {"f32"}


@pytest.mark.slow
def test_values_are_those_of_a_step_that_casts_by_hand():
    def by_hand(p, d):
        def narrow(p, d):
            low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
            hidden = jax.nn.relu(d["x"].astype(jnp.bfloat16) @ low["a"])
            logits = jnp.matmul(hidden, low["b"], preferred_element_type=jnp.float32)
            return jnp.mean((jax.nn.softmax(logits) - d["y"]) ** 2)

        value, grads = jax.value_and_grad(narrow)(p, d)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value

    args = weights(), data()
    ours, theirs, plain = parallel(sgd, precision="bf16")(*args), jax.jit(by_hand)(*args), jax.jit(sgd)(*args)
    assert abs(ours[1] - theirs[1]) < 1e-6 < abs(ours[1] - plain[1])
    for name in "ab":
        change = plain[0][name] - args[0][name]
        assert jnp.linalg.norm(ours[0][name] - plain[0][name]) < 0.01 * jnp.linalg.norm(change)
        assert not np.array_equal(ours[0][name], plain[0][name])


def test_what_bf16_holds_is_computed_to_the_bit():
    """Small integers and powers of two: no rounding anywhere, so precision changes nothing."""

    def step(p, d):
        def inner(p):
            return jnp.sum((jax.nn.relu(d["x"] @ p["a"]) @ p["b"]) * d["y"])

        value, grads = jax.value_and_grad(inner)(p)
        return jax.tree.map(lambda w, g: w - 0.125 * g, p, grads), value

    rng = np.random.default_rng(0)
    p = {n: jnp.asarray(rng.integers(-1, 2, (8, 8)), jnp.float32) for n in "ab"}
    d = {n: rng.integers(-2, 3, (8, 8)).astype(np.float32) for n in "xy"}
    ours, plain = parallel(step, precision="bf16")(p, d), jax.jit(step)(p, d)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def layered(layers=3):
    def step(p, d):
        def inner(p):
            def layer(h, w):
                return h + jnp.tanh(h @ w), ()

            h, _ = jax.lax.scan(layer, d["x"] @ p["first"], p["w"])
            return jnp.mean((h - d["y"]) ** 2)

        value, grads = jax.value_and_grad(inner)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    p = {"first": weights()["a"], "w": jnp.stack([weights()["b"]] * layers)}
    return step, p


def test_a_loop_over_layers_carries_and_stacks_narrow():
    step, p = layered()
    graph = graph_of(step, (p, data()))
    forward, backward = (op for op in graph.operators if op.primitive == "scan")
    carried, *rows = (v.type for v in forward.results)
    assert carried.dtype == "bf16" and {t.dtype for t in rows if t.rank > 1} == {"bf16"}
    gradient = next(v.type for v in backward.results if v.type.shape == (3, 32, 32))
    assert gradient.dtype == "f32"
    assert {ops for ops, _ in dtypes(graph, "dot_general")} == {("bf16", "bf16")}
    ours, plain = parallel(step, precision="bf16")(p, data()), jax.jit(step)(p, data())
    np.testing.assert_allclose(ours[1], plain[1], rtol=5e-3)
    change = plain[0]["w"] - p["w"]
    assert jnp.linalg.norm(ours[0]["w"] - plain[0]["w"]) < 0.02 * jnp.linalg.norm(change)


@pytest.mark.parametrize("jitted", [False, True])
def test_accumulated_gradients_are_added_in_float32(jitted):
    def step(p, d):
        grad = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)

        def body(total, part):
            return jax.tree.map(jnp.add, total, grad(p, part)), ()

        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), d)
        total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, p), parts)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, total)

    graph = graph_of(step, (weights(), data()))
    assert {ops for ops, _ in dtypes(graph, "dot_general")} == {("bf16", "bf16")}
    (loop,) = (op for op in graph.operators if op.primitive == "scan")
    added = [ops for ops, _ in dtypes(loop.region("body"), "add")]
    assert added.count(("f32", "f32")) >= 2
    assert {v.type.dtype for v in loop.results} == {"f32"}


def test_recomputation_holds_narrow_values():
    def step(p, d):
        value, grads = jax.value_and_grad(jax.checkpoint(loss))(p, d)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value

    graph = graph_of(step, (weights(), data()))
    assert {ops for ops, _ in dtypes(graph, "dot_general")} == {("bf16", "bf16")}
    assert any(op.primitive == "optimization_barrier" for op in graph.operators)
    ours, plain = (
        parallel(step, precision="bf16")(weights(), data()),
        parallel(sgd, precision="bf16")(weights(), data()),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), ours, plain)


@pytest.mark.slow
def test_a_step_that_mixes_by_itself_keeps_its_meaning():
    step, args = mlp.build("tiny", dtype="bfloat16")
    with_it, without = parallel(step, precision="bf16")(*args), parallel(step)(*args)
    jax.tree.map(np.testing.assert_array_equal, with_it, without)


def test_no_gradient_no_change():
    def evaluate(p, d):
        return loss(p, d)

    assert graph_of(evaluate, (weights(), data())) == graph_of(evaluate, (weights(), data()), Precision("f16"))
    assert {ops for ops, _ in dtypes(graph_of(evaluate, (weights(), data())), "dot_general")} == {("f32", "f32")}


def test_plans_hold_and_send_less():
    """Parameters are gathered in bf16 where the plan splits them, and activations are half as large."""
    tx = optax.adam(1e-3)

    def step(state, d):
        p, opt = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(d["x"] @ p["a"]) @ p["b"] - d["y"]) ** 2))(p)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(p, updates), opt), value

    p = weights(64)
    # Less than parameters, moments and gradients take whole: the state has to be split.
    options = {"cluster": SLOW, "mesh_shape": (8,), "memory_limit": 150_000}
    args = (p, tx.init(p)), data(512, 64)
    wide = parallel(step, **options).compile(*args)
    narrow = parallel(step, precision="bf16", **options).compile(*args)
    assert narrow.plan.peak_memory < 0.8 * wide.plan.peak_memory
    gathered = [{c.bytes for c in q.plan.communication if c.kind == "all-gather"} for q in (wide, narrow)]
    assert gathered == [{64 * 64 * 4}, {64 * 64 * 2}]
    # XLA's CPU compiler sends bf16 as float32, so the program is read before it.
    lowered = parallel(step, precision="bf16", **options).lower(*args).as_text()
    types = re.findall(r"all_gather.*?-> tensor<\w+x(\w+)>", lowered)
    assert types and set(types) == {"bf16"}


def test_a_plan_of_narrow_values_is_verified_and_run_again():
    step = parallel(sgd, precision="bf16")
    args = weights(), data()
    plan = step.plan(*args)
    assert autopar.verify(plan, step, *args).rows is not None
    again = parallel(sgd, precision="bf16", plan=plan)(*args)
    jax.tree.map(np.testing.assert_array_equal, again, step(*args))


def test_wrong_options_are_refused():
    with pytest.raises(AutoparError, match="precision='f64'"):
        autopar.parallelize(sgd, precision="f64")
    with pytest.raises(AutoparError, match="compute='int8'"):
        autopar.Precision("int8")
    with pytest.raises(AutoparError, match="deny='tanh'"):
        Precision("bf16", deny="tanh")


@pytest.mark.slow
@pytest.mark.parametrize("module", [gpt, moe, wide_resnet], ids=["gpt", "moe", "wide_resnet"])
def test_300_steps_end_within_1_percent_of_float32(module):
    step, (first, batch) = module.build("tiny", dtype="float32")
    ends = [last_loss(parallel(step, precision=precision), first, batch) for precision in (None, "bf16")]
    assert abs(ends[1] - ends[0]) <= 0.01 * max(ends[0], 0.1), ends
