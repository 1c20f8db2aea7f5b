"""What single models promise: scan equals loop, causal attention, tied tables, dropout, masks, norms."""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import demo, gpt, llama, moe, wide_resnet
from examples._common import causal_attention, token_loss
from examples._kernels import product_in_8_bits
from tests.examples.quick import quick_jit, quick_metrics


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def slow_attention(q: Any, k: Any, v: Any) -> Any:
    batch, seq, heads, head_dim = q.shape
    share = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for t in range(seq):
                scores = k[b, : t + 1, h // share] @ q[b, t, h] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, h // share]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_matches_a_loop(kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, heads, 6)) for heads in (4, kv_heads, kv_heads))
    with jax.enable_x64(True):
        np.testing.assert_allclose(causal_attention(*map(jnp.asarray, (q, k, v))), slow_attention(q, k, v), atol=1e-12)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (gpt, {}),
        pytest.param(gpt, {"scan": True, "remat_attention": True}, marks=pytest.mark.slow),
        pytest.param(llama, {"remat": False, "kv_heads": 4}, marks=pytest.mark.slow),
    ],
)
def test_kernels_by_hand_have_the_gradients_of_plain_ones(model: ModuleType, options: dict[str, Any]) -> None:
    plain, args = model.build(seq=8, batch=2, **options)
    by_hand, _ = model.build(seq=8, batch=2, by_hand=True, **options)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda leaf: leaf.astype("float64") if leaf.dtype == "float32" else leaf, args)
        (a, one), (b, other) = quick_jit(plain)(*args), quick_jit(by_hand)(*args)
        assert_close(a["opt_state"], b["opt_state"], 1e-5)
        assert_close(one, other, 1e-6)


def test_kernels_by_hand_keep_narrow_values_alone() -> None:
    """Of attention that differentiation keeps in float32, a kernel keeps the shares in the dtype of the computation."""
    q = jnp.ones((1, 16, 2, 4), jnp.float16)

    def kept(by_hand: bool) -> set[Any]:
        residuals = jax.vjp(lambda q: causal_attention(q, q, q, by_hand=by_hand), q)[1]
        return {x.dtype for x in jax.tree.leaves(residuals) if x.ndim == 4 and x.dtype != bool}

    assert jnp.dtype("float32") in kept(False)
    assert kept(True) == {jnp.dtype("float16")}


def test_products_in_8_bits_are_near_those_in_16() -> None:
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 16, 32), (32, 8)))
    (want, wanted), (got, grads) = (
        jax.value_and_grad(lambda x, w, f=f: (f(x, w) ** 2).sum(), (0, 1))(x, w)
        for f in (jnp.matmul, product_in_8_bits)
    )
    assert float(got) == pytest.approx(float(want), rel=0.1)
    for a, b in zip(grads, wanted, strict=True):
        error = jnp.linalg.norm((a - b).astype("f4")) / jnp.linalg.norm(b.astype("f4"))
        assert a.dtype == b.dtype and 0 < float(error) < 0.15


def test_token_loss_matches_numpy() -> None:
    rng = np.random.default_rng(0)
    logits, labels, mask = rng.normal(size=(2, 3, 7)), rng.integers(0, 7, (2, 3)), np.array([[1, 0, 2], [0, 1, 1]])
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    with jax.enable_x64(True):
        assert float(token_loss(jnp.asarray(logits), jnp.asarray(labels))) == pytest.approx(losses.mean())
        masked = token_loss(jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(mask))
        assert float(masked) == pytest.approx((losses * mask).sum() / 5)


@pytest.mark.parametrize(
    "options", [{"unroll": True}, pytest.param({"remat": False}, marks=pytest.mark.slow)], ids=["unrolled", "kept"]
)
def test_llama_in_scans_equals_other_ways(options: dict[str, bool]) -> None:
    _, args = llama.build(kv_heads=4)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda leaf: leaf.astype("float64") if leaf.dtype == "float32" else leaf, args)
        found, scanned = (
            quick_jit(llama.build(abstract=True, kv_heads=4, dtype="float64", **changed)[0])(*args)
            for changed in (options, {})
        )
        assert_close(found, scanned, 1e-9)


@pytest.mark.slow
def test_gpt_scanned_equals_unrolled() -> None:
    options = {"layers": 2, "dropout": 0.25, "dtype": "float64"}

    def stacked(tree: Any) -> Any:
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tree["blocks"])
        return {**tree, "blocks": blocks}

    with jax.enable_x64(True):
        unrolled, (state, batch) = gpt.build(**options)
        scanned, (scanned_state, _) = gpt.build(scan=True, remat=True, **options)
        assert_close(stacked(state["params"]), scanned_state["params"], 1e-12)
        state, loss = quick_jit(unrolled)(state, batch)
        scanned_state, scanned_loss = quick_jit(scanned)(scanned_state, batch)
        assert_close(scanned_loss, loss, 1e-9)
        assert_close(stacked(state["params"]), scanned_state["params"], 1e-9)


def test_llama_options_show_in_the_program() -> None:
    def primitives(**options: bool) -> set[str]:
        config = dataclasses.replace(llama.PRESETS["tiny"], **options)
        shapes = jax.eval_shape(lambda: llama.init_params(config))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda p, t: llama.apply(config, p, t))(shapes, tokens)
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        scans = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        return names | {eqn.primitive.name for inner in scans for eqn in inner.eqns}

    remat = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns[0].primitive.name
    assert {"scan", remat} <= primitives()
    assert "scan" in primitives(remat=False)
    assert remat not in primitives(remat=False)
    assert remat in primitives(unroll=True)
    assert "scan" not in primitives(unroll=True)


def test_rotary_products_depend_on_distance_only() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=8), (1, 9, 1, 8))) for _ in range(2))
        products = np.einsum("bqhd,bkhd->qk", llama.rotate(q, 100.0), llama.rotate(k, 100.0))
        for distance in range(-8, 9):
            diagonal = np.diagonal(products, distance)
            np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), atol=1e-12)
        assert np.ptp(products) > 0.1
        np.testing.assert_allclose(jnp.sum(llama.rotate(q, 100.0) ** 2, -1), jnp.sum(q**2, -1), atol=1e-12)


def test_rms_norm_matches_numpy() -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(3, 8))
        scale = np.arange(8.0)
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
        np.testing.assert_allclose(llama.rms_norm(jnp.asarray(x), jnp.asarray(scale)), expected, atol=1e-12)


@pytest.mark.parametrize("module", [gpt, llama], ids=["gpt", "llama"])
def test_logits_do_not_see_later_tokens(module: ModuleType) -> None:
    config = module.PRESETS["tiny"]
    _, (state, batch) = module.build()
    if module is gpt:
        apply = gpt.make_model(config)[1]
    else:

        def apply(params: Any, tokens: Any) -> Any:
            return llama.apply(config, params, tokens)

    compiled = quick_jit(apply)
    tokens = batch["tokens"]
    before = compiled(state["params"], tokens)
    after = compiled(state["params"], tokens.at[:, 9].add(1) % config.vocab)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-4


@pytest.mark.slow
def test_gpt_ties_its_embeddings() -> None:
    _, (tied, _) = gpt.build(abstract=True)
    _, (free, _) = gpt.build(abstract=True, tied=False)
    assert "head" not in tied["params"]["ends"]
    assert free["params"]["ends"].pop("head")["kernel"].shape == (64, 128)
    assert free["params"] == tied["params"]
    config = gpt.Config(layers=1)
    init, apply = gpt.make_model(config)
    params = init(jax.random.key(0))
    tokens = jnp.zeros((1, 4), jnp.int32)
    grad = quick_jit(jax.grad(lambda p: jnp.sum(apply(p, tokens) ** 2)))(params)["ends"]["tokens"]["embedding"]
    # Rows of tokens that do not occur get a gradient too: through the output projection.
    assert bool(jnp.all(jnp.any(grad != 0, axis=-1)))


def test_gpt_dropout_depends_on_seed_and_step_only() -> None:
    step, (state, batch) = gpt.build(dropout=0.2, layers=1)
    compiled = quick_metrics(step)
    first, again = (float(compiled(state, batch)["loss"]) for _ in range(2))
    later = float(compiled({**state, "step": state["step"] + 1}, batch)["loss"])
    assert first == again
    assert first != later
    assert "rng" not in gpt.build(abstract=True)[1][0]


def test_gpt_dropout_keeps_the_mean() -> None:
    x = jnp.ones((200, 200))
    y = gpt._dropout(x, 0.25, jax.random.key(0))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert float(jnp.mean(y)) == pytest.approx(1.0, abs=0.02)
    assert gpt._dropout(x, 0.25, None) is x


@pytest.mark.slow
def test_gpt_mask_leaves_out_tokens() -> None:
    step, (state, batch) = gpt.build(masked=True, layers=1)
    compiled = quick_jit(step)
    assert 0 < float(batch["mask"].mean()) < 1
    hidden = {**batch, "labels": jnp.where(batch["mask"] > 0, batch["labels"], 0)}
    assert_close(compiled(state, batch), compiled(state, hidden), 0.0)
    everything = {**batch, "mask": jnp.ones_like(batch["mask"])}
    plain = quick_metrics(gpt.build(abstract=True, layers=1)[0])
    bare = {"tokens": batch["tokens"], "labels": batch["labels"]}
    assert float(compiled(state, everything)[1]["loss"]) == pytest.approx(float(plain(state, bare)["loss"]), 1e-6)


@pytest.mark.slow
def test_gpt_clipping_is_by_global_norm() -> None:
    # The first moment after one step is 0.1 times the gradient that Adam saw.
    def seen_norm(clip: float | None) -> float:
        step, args = gpt.build(clip=clip, layers=1)
        state = quick_jit(step)(*args)[0]
        adam = state["opt_state"][0] if clip is None else state["opt_state"][1][0]
        return 10.0 * float(jnp.sqrt(sum(jnp.sum(m**2) for m in jax.tree.leaves(adam.mu))))

    assert seen_norm(None) > 0.05
    assert seen_norm(0.05) == pytest.approx(0.05, rel=1e-4)


def test_moe_has_a_mixture_in_every_second_layer() -> None:
    _, (state, _) = moe.build(abstract=True, layers=4)
    assert ["router" in layer for layer in state["params"]["layers"]] == [False, True, False, True]
    assert state["params"]["layers"][1]["up"].shape == (8, 64, 128)


@pytest.mark.slow
@pytest.mark.parametrize("norm", wide_resnet.NORMS)
def test_resnet_norm_decides_whether_examples_mix(norm: str) -> None:
    config = dataclasses.replace(wide_resnet.PRESETS["tiny"], norm=norm)
    _, (state, batch) = wide_resnet.build(norm=norm)
    compiled = quick_jit(lambda params, images: wide_resnet.apply(config, params, images))
    images = batch["images"]
    before = compiled(state["params"], images)
    after = compiled(state["params"], images.at[0].multiply(3.0))
    assert (np.abs(before[1:] - after[1:]).max() > 1e-4) == (norm == "batch")
    assert before.shape == (8, 16)


@pytest.mark.parametrize("norm", wide_resnet.NORMS)
def test_resnet_norm_matches_numpy(norm: str) -> None:
    config = wide_resnet.Config(norm=norm, groups=4)
    x = np.random.default_rng(0).normal(2.0, 3.0, size=(2, 3, 3, 8))
    view, dims = (x, (0, 1, 2)) if norm == "batch" else (x.reshape(2, 3, 3, 4, 2), (1, 2, 4))
    expected = (view - view.mean(dims, keepdims=True)) / np.sqrt(view.var(dims, keepdims=True) + 1e-5)
    with jax.enable_x64(True):
        got = wide_resnet.normalise(config, jnp.asarray(x), jnp.full(8, 2.0), jnp.ones(8))
    np.testing.assert_allclose(got, 2 * expected.reshape(x.shape) + 1, atol=1e-10)


def test_resnet_large_stem_and_stages_shrink_the_image() -> None:
    step, args = wide_resnet.build(
        abstract=True, small_stem=False, image=64, stages=(1, 2, 1), base_channels=8, width_factor=4
    )
    assert args[0]["params"]["stem"]["kernel"].shape == (7, 7, 3, 8)
    assert args[0]["params"]["blocks"][1]["spatial"]["kernel"].shape == (3, 3, 16, 64)
    jaxpr = jax.make_jaxpr(step)(*args)
    sides = {var.aval.shape[1] for eqn in jaxpr.eqns for var in eqn.outvars if var.aval.shape[:1] == (8,)
             and len(var.aval.shape) == 4 and var.aval.shape[1] == var.aval.shape[2]}  # fmt: skip
    assert {32, 16, 8, 4} <= sides


def test_resnet_refuses_an_unknown_norm() -> None:
    with pytest.raises(ValueError, match="known: group, batch"):
        wide_resnet.build(norm="layer")


def test_demo_asks_for_devices_and_keeps_other_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    demo.configure(8)
    assert demo.os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=8"
    assert demo.os.environ["JAX_PLATFORMS"] == "cpu"


def test_demo_losses_carry_the_state() -> None:
    assert demo.losses(lambda state, batch: (state + batch, {"loss": state}), 1.0, 2.0, 3) == [1.0, 3.0, 5.0]
