"""A step in microbatches returns what the step returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.phases import phase_of
from autopar.lower.microbatch import microbatched
from autopar.lower.rewrites import recomputed_step
from autopar.microbatch import analyze
from examples import gpt, llama, mlp, moe, wide_resnet
from tests.microbatch.running import assert_same_in_microbatches, numbers, run, traced

TEXT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}
EXAMPLES = {
    "mlp": (mlp.build, {}),
    "gpt": (gpt.build, TEXT),
    "gpt dropout masked": (gpt.build, {**TEXT, "layers": 1, "dropout": 0.1, "masked": True}),
    "gpt scanned": (gpt.build, {**TEXT, "scan": True, "remat": True, "dropout": 0.1}),
    "llama": (llama.build, {**TEXT, "kv_heads": 2}),
    "moe": (moe.build, {"gate": "gshard"}),
    "resnet": (wide_resnet.build, {"stages": (1,), "base_channels": 8, "groups": 2, "image": 8}),
}


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_examples(name):
    build, overrides = EXAMPLES[name]
    step, args = build(dtype="float64", **overrides)
    assert_same_in_microbatches(step, args, (2,), rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_all_examples(name):
    build, overrides = EXAMPLES[name]
    step, args = build(dtype="float64", **overrides)
    assert_same_in_microbatches(step, args, (2, 8), rtol=1e-11)


def data(rows=8, width=4, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, width)),
        "y": rng.normal(size=rows),
        "mask": (rng.random(rows) < 0.6).astype(float),
        "group": rng.integers(0, 3, rows),
    }


def weights(width=4):
    return {"w": np.linspace(-1, 1, width * 3).reshape(width, 3), "v": np.linspace(0.5, 1, 3)}


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def step_of(loss_fn):
    def step(params, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return sgd(params, grads), {"loss": loss, **aux}

    return step


def mean_loss(params, b):
    return jnp.mean((predict(params, b["x"]) - b["y"]) ** 2), {}


def sum_loss(params, b):
    return jnp.sum((predict(params, b["x"]) - b["y"]) ** 2), {}


def masked_loss(params, b):
    errors = (predict(params, b["x"]) - b["y"]) ** 2
    count = jnp.maximum(b["mask"].sum(), 1.0)
    return (errors * b["mask"]).sum() / count, {"tokens": count}


def centred_inputs(params, b):
    """Statistics of data alone may mix examples: they are taken before the loop."""
    x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
    return jnp.mean((predict(params, x) - b["y"]) ** 2), {}


def many_outputs(params, b):
    p = predict(params, b["x"])
    errors = (p - b["y"]) ** 2
    return errors.mean(), {
        "predictions": p,
        "worst": errors.max(),
        "least": errors.min(),
        "any": (errors > 1.0).any(),
        "all": (errors > 0.0).all(),
        "rows": jnp.stack([p, errors], axis=0),
        "correct": (jnp.round(p) == b["group"]).sum(),
        "by_group": jax.ops.segment_sum(errors, b["group"], 3),
        "sorted": jnp.sort(p),
        "norm": jnp.sqrt(jnp.sum(p**2)),
    }


def scanned_over_time(params, b):
    def cell(carry, x):
        return jnp.tanh(carry + x[:, None] * params["v"]), carry.sum(-1)

    last, trail = lax.scan(cell, jnp.zeros((b["x"].shape[0], 3)), b["x"].T)
    return jnp.mean((last.sum(-1) - b["y"]) ** 2), {"trail": trail}


def with_branches(params, b):
    p = lax.cond(params["v"][0] > 0, predict, lambda q, x: 2.0 * predict(q, x), params, b["x"])
    p = lax.fori_loop(0, 3, lambda i, p: jnp.sin(p) + i, p)
    return jnp.mean((p - b["y"]) ** 2), {}


def remated(params, b):
    p = jax.checkpoint(predict)(params, b["x"])
    return jnp.mean((p - b["y"]) ** 2), {}


def broadcast_weights(params, b):
    """What is made of shapes alone has the batch's size, but is the same in every turn."""
    weights_ = jnp.broadcast_to(params["v"][0], b["y"].shape) + jnp.arange(b["y"].shape[0])
    return jnp.mean(weights_ * (predict(params, b["x"]) - b["y"]) ** 2), {}


def picked_by_label(params, b):
    """The position along the batch counts: each example reads its own row."""
    logits = jax.nn.log_softmax(jnp.tanh(b["x"] @ params["w"]) * params["v"])
    return -jnp.mean(logits[jnp.arange(b["x"].shape[0]), b["group"]]), {}


LOSSES = [
    mean_loss, sum_loss, masked_loss, centred_inputs, many_outputs, scanned_over_time, with_branches, remated,
    broadcast_weights, picked_by_label,
]  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_losses(loss_fn):
    assert_same_in_microbatches(step_of(loss_fn), (weights(), data()), (2, 8))


def test_dropout_draws_the_same_bits():
    def step(params, key, batch):
        def loss_fn(p):
            keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
            return jnp.mean((predict(p, jnp.where(keep, batch["x"], 0)) - batch["y"]) ** 2), keep

        grads, keep = jax.grad(loss_fn, has_aux=True)(params)
        return sgd(params, grads), keep

    plain = assert_same_in_microbatches(step, (weights(), jax.random.key(3), data()), (4,))
    found = analyze(plain.graph, 4)
    drawn = [id for id in found.body if "random_bits" in id]
    assert drawn, "the bits of a microbatch are drawn in its turn"


def test_a_batch_on_the_second_dim():
    def step(params, batch):
        grads = jax.grad(lambda p: jnp.mean(predict(p, batch["x"].transpose(1, 2, 0)) ** 2))(params)
        return sgd(params, grads)

    x = np.random.default_rng(0).normal(size=(4, 6, 5))
    plain = assert_same_in_microbatches(step, (weights(), {"x": x}), (2, 3), rtol=1e-11)
    assert analyze(plain.graph, 3).batch == {"batch['x']": 1}


def test_half_precision_gradients_add_up_in_float32():
    """2,048 equal gradients of 1/2048: their sum is 1, which terms of bfloat16 added in bfloat16 do not reach."""

    def step(params, batch):
        grads = jax.grad(lambda p: jnp.sum(p["w"] * batch["x"]))(params)
        return jax.tree.map(lambda p, g: g, params, grads)

    x = {"x": jnp.full((2048,), 1.0 / 2048, jnp.bfloat16)}
    assert_same_in_microbatches(step, ({"w": jnp.ones((), jnp.bfloat16)}, x), (1024,), rtol=1e-3)


def scan_layers(layer, x, params):
    return lax.scan(lambda y, w: (layer(y, w), None), x, params)[0]


def while_layers(layer, x, params):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1], params[c[0]])), (0, x))[1]


def cond_layers(layer, x, params):
    return lax.cond(params.sum() > 0, lambda y: layer(y, params[0]), lambda y: layer(y, params[1]), x)


@pytest.mark.parametrize("layers", [scan_layers, while_layers, cond_layers])
def test_a_mask_for_all_examples_is_made_in_pieces(layers):
    """It is the same in every turn, but of the batch's size; a region that reads it in pieces is given its piece."""

    def step(params, batch):
        def loss(params):
            fixed = lax.stop_gradient(params)
            mask = jnp.broadcast_to(jnp.tril(fixed.sum() > jnp.zeros((4, 4))), (batch.shape[0], 4, 4))

            def layer(x, w):
                return jnp.tanh(jnp.where(mask, x[:, :, None] * x[:, None, :], 0.5).sum(-1) @ w)

            return jnp.mean((layers(layer, batch, fixed) @ params[0]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - grads, value

    args = (jax.random.normal(jax.random.key(0), (2, 4, 4)), jax.random.normal(jax.random.key(1), (12, 4)))
    plain = assert_same_in_microbatches(step, args, [1, 2, 6])
    found = analyze(plain.graph, 6)
    types = [plain.graph.types[n] for n in found.body_inputs if n not in found.batch]
    assert types and all(12 not in type.shape for type in types)


@pytest.mark.slow
def test_loops_that_are_alike_but_for_what_they_are_given():
    """Examples are rows in one of them and columns in the other."""

    def step(params, batch):
        def loss(params):
            def mean_after(x):
                return jnp.mean(scan_layers(lambda y, w: jnp.tanh(y * w), x, params) ** 2)

            return mean_after(batch) + mean_after(batch.T)

        value, grads = jax.value_and_grad(loss)(params)
        return params - grads, value

    args = (jax.random.normal(jax.random.key(0), (2,)), jax.random.normal(jax.random.key(1), (12, 12)))
    assert_same_in_microbatches(step, args, [1, 2, 6])


def test_what_is_linear_in_gradients_runs_once():
    """Each microbatch's term could be scaled: it would be the same, as often as there are microbatches."""

    def step(params, batch):
        grads = jax.grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * jnp.transpose(jnp.transpose(g)), params, grads)

    plain, _ = traced(step, (weights(), data()))
    body = set(analyze(plain.graph, 4).body)
    update = [op for op in plain.graph.operators if phase_of(op) == "update"]
    assert {op.primitive for op in update} >= {"mul", "transpose", "sub"}
    assert [op.id for op in update if op.id in body] == []


@pytest.mark.slow
def test_the_update_runs_once():
    step, args = gpt.build(dtype="float64", **TEXT)
    plain, _ = traced(step, args)
    found = analyze(plain.graph, 4)
    in_loop = [op for op in plain.graph.operators if op.id in set(found.body)]
    assert not [op.id for op in in_loop if op.primitive == "sqrt"]
    assert sum(op.primitive == "dot_general" for op in in_loop) == sum(
        op.primitive == "dot_general" for op in plain.graph.operators
    )


def checkpointed_step():
    """Two layers that the user's own `jax.checkpoint` computes again."""

    def layer(w, h):
        return jnp.tanh(h @ w["kernel"] + w["bias"])

    def step(params, batch):
        def loss(params):
            h = batch["x"]
            for w in params:
                h = jax.checkpoint(layer)(w, h)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = [{"kernel": jax.random.normal(k, (8, 8)), "bias": jnp.ones(8)} for k in keys[:2]]
    return step, (params, {"x": jax.random.normal(keys[2], (16, 8))})


RECOMPUTED = {
    "gpt, selective": (lambda: gpt.build(dtype="float64", **{**TEXT, "layers": 1}), "selective"),
    "gpt, full": (lambda: gpt.build(dtype="float64", **{**TEXT, "layers": 1}), "full"),
    "moe, full": (lambda: moe.build(dtype="float64"), "full"),
    "jax.checkpoint": (checkpointed_step, "none"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", sorted(RECOMPUTED))
def test_what_is_computed_anew_runs_in_the_loop_alone(name):
    """What is the same in every turn lies behind a barrier with what is not: it must not pull that out of the loop."""
    build, level = RECOMPUTED[name]
    plain, leaves = traced(*build())
    again, _ = recomputed_step(plain, level)
    found = analyze(again.graph, 4)
    of_batch = {i.name for i in again.graph.inputs if i.role == "batch"}
    for op in again.graph.operators:
        if not of_batch.isdisjoint(op.operands):
            of_batch.update(v.name for v in op.results)
    outside = {*found.before, *found.after} & set(found.body)
    twice = [id for id in outside if any(v.name in of_batch for v in again.graph.by_id[id].results)]
    assert not twice
    products = [op.id for op in again.graph.operators if op.primitive == "dot_general"]
    assert products and set(products) <= set(found.body)
    for a, b in zip(run(microbatched(again, 4), leaves), run(plain, leaves), strict=True):
        if b.dtype.kind == "f":
            assert np.linalg.norm(numbers(a) - numbers(b)) <= 1e-10 * np.linalg.norm(numbers(b))
