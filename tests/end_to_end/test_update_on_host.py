"""The update on the host: the same values, state that devices do not hold, and a cut that follows the links."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar import Cluster, Plan, parallelize, verify
from autopar.errors import AutoparError
from autopar.lower.aot import parse_target
from autopar.lower.hosted import PINNED_HOST
from autopar.plan.words import plan_words
from examples import gpt, mlp
from tests.end_to_end import stacked
from tests.end_to_end.test_layers_on_host import on_host, one_device, trained, two_devices, with_hosts

OPTIONS = {"num_stages": 1, "num_microbatches": 1, "remat": "none"}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
}


def build(optimizer, compute, width=16, layers=2, batch=16):
    """Step and arguments of a perceptron that computes in ``compute`` and keeps its parameters as they are."""
    rng = np.random.default_rng(0)

    def loss(params, x, y):
        for w, b in params:
            x = jnp.tanh(x @ w.astype(compute) + b.astype(compute))
        return jnp.mean((x - y).astype(jnp.float32) ** 2)

    def step(state, batch):
        params, kept = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, kept = optimizer.update(gradients, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    dtype = jnp.result_type(float)
    params = [(jnp.asarray(rng.normal(size=(width, width)) / 4, dtype), jnp.zeros(width, dtype)) for _ in range(layers)]
    x, y = (jnp.asarray(rng.normal(size=(batch, width)), compute) for _ in range(2))
    return step, ((params, optimizer.init(params)), (x, y))


def operators_there(plan: Plan) -> set[str]:
    return {r.id for r in plan.content.operators if r.on_host}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_values_are_those_of_the_plain_step(x64, name, mesh):
    step, args = build(OPTIMIZERS[name], jnp.float64)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=mesh, offload="update", **OPTIONS)
    there, wanted = trained(fn, args), trained(jax.jit(step), args)
    assert operators_there(fn.plan(*args)) or name == "adafactor"  # whose state is small
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_masters_of_narrow_parameters_lie_there():
    step, args = build(OPTIMIZERS["adamw"], jnp.bfloat16)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=(8,), offload="update", **OPTIONS)
    plan = fn.plan(*args)
    assert on_host(plan) == {i.path for i in plan.content.inputs if i.path.startswith("state") and i.layout != "[]"}
    (params, _), _ = trained(fn, args)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)} == {PINNED_HOST}
    (wanted, _), _ = trained(jax.jit(step), args)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_precision_has_masters_too():
    step, args = mlp.build(hidden=32, layers=2, batch=16)
    fn = parallelize(
        step, cluster=with_hosts(Cluster.local()), mesh_shape=(8,), offload="update", precision="bf16", **OPTIONS
    )
    assert any("convert" in id for id in operators_there(fn.plan(*args)))
    assert "updated there" in plan_words(fn.plan(*args).content)


@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_the_cut_follows_the_links(compute):
    """Links as slow as PCIe: the host computes. Links faster than its memory: devices do, and state moves."""
    step, args = build(OPTIMIZERS["adamw"], compute, width=512)
    slow, fast = (
        parallelize(step, cluster=one_device(speed, launch_s=0.0), offload="update", **OPTIONS).plan(*args)
        for speed in (16e9, 1e13)
    )
    assert operators_there(slow) and not operators_there(fast)
    assert on_host(slow) == on_host(fast)


@pytest.mark.parametrize(("compute", "bytes_each"), [(jnp.float32, 4 + 4), (jnp.bfloat16, 2 + 2)])
def test_bytes_on_the_link(compute, bytes_each):
    """bfloat16: gradients down and parameters up, 4 bytes a parameter as in the paper. float32 parameters stay on the
    device, so that gradients go down and updates come up."""
    step, args = build(OPTIMIZERS["clipped adam"] if compute is None else optax.adam(1e-2), compute, width=512)
    plan = parallelize(step, cluster=one_device(1e9, launch_s=0.0), offload="update", **OPTIONS).plan(*args)
    weights = 2 * 512 * 512
    assert plan.stages[0].host_time * 1e9 == pytest.approx(bytes_each * weights, rel=0.02)
    assert plan.stages[0].host_bytes == pytest.approx((12 if compute == jnp.bfloat16 else 8) * weights, rel=0.02)


@pytest.mark.slow
def test_memory_of_the_device_is_less():
    step, args = build(OPTIMIZERS["adamw"], jnp.bfloat16, width=512, layers=8, batch=8)
    options = {**OPTIONS, "cluster": one_device(16e9), "donate_argnums": 0}
    plain = parallelize(step, **options).plan(*args)
    there = parallelize(step, offload="update", **options).plan(*args)
    assert there.peak_memory < plain.peak_memory / 2
    assert there.step_time == pytest.approx(there.search.objective)


@pytest.mark.few(1)
@pytest.mark.parametrize(("bandwidth", "computes"), [(16e9, True), (1e13, False)], ids=["slow", "fast"])
def test_auto_chooses_by_price_who_updates(bandwidth, computes):
    """Under a limit that moments do not fit: over a slow link hosts update, over a fast one moments move."""
    step, args = build(OPTIMIZERS["adamw"], jnp.float32, width=512, layers=4, batch=8)
    options = {**OPTIONS, "cluster": one_device(bandwidth, launch_s=0.0), "donate_argnums": 0}
    plain = parallelize(step, **options).plan(*args)
    roomy = parallelize(step, offload="auto", **options).plan(*args)
    assert not operators_there(roomy) and not on_host(roomy)
    options["memory_limit"] = int(0.6 * plain.peak_memory)
    named = parallelize(step, offload="update", **options).plan(*args)
    plan = parallelize(step, offload="auto", **options).plan(*args)
    assert bool(operators_there(plan)) == computes and on_host(plan)
    assert plan.peak_memory <= options["memory_limit"]
    assert plan.step_time <= named.step_time * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "more"), [(jnp.float32, 1.0), (jnp.bfloat16, 6 / 4)])
def test_a_global_norm_keeps_no_gradient_on_the_device(compute, more):
    """Devices add up the squares of a gradient and send it: what is left of it there is a number."""
    cluster = one_device(16e9, launch_s=0.0)
    options = {**OPTIONS, "cluster": cluster, "donate_argnums": 0, "offload": "update"}
    plans = {}
    for name in ("adam", "clipped adam"):
        optimizer = optax.adam(1e-2) if name == "adam" else OPTIMIZERS[name]
        step, args = build(optimizer, compute, width=512, layers=8, batch=8)
        plans[name] = parallelize(step, **options).plan(*args)
    free, clipped = plans.values()
    assert clipped.stages[0].host_time == pytest.approx(more * free.stages[0].host_time, rel=0.05)
    assert clipped.peak_memory < 1.1 * free.peak_memory


def test_a_saved_plan_runs_as_it_was_made(x64):
    step, args = build(OPTIMIZERS["adamw"], jnp.float64)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=(8,), offload="update", **OPTIONS)
    plan = Plan.from_json(fn.plan(*args).to_json())
    assert plan == fn.plan(*args) and operators_there(plan)
    there, wanted = trained(parallelize(step, plan=plan), args, 1), trained(jax.jit(step), args, 1)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "microbatches"), [("adamw", 2), ("clipped adam", 1)])
def test_stages_are_updated_on_their_hosts(x64, name, microbatches):
    step, args = build(OPTIMIZERS[name], jnp.float64, layers=4)
    options = {"num_stages": 2, "num_microbatches": microbatches, "remat": "none", "offload": "update"}
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), **options)
    plan = fn.plan(*args)
    assert not any("update" in note for note in plan.content.notes)
    for part, stage in zip(plan.content.parts, plan.stages, strict=True):
        assert any(o.on_host for o in part.operators) and stage.host_bytes > 0
    moments = {i.path for i in plan.content.inputs if ("mu" in i.path or "nu" in i.path) and i.layout != "[]"}
    assert moments <= on_host(plan)
    (there, _), (wanted, _) = trained(fn, args), trained(jax.jit(step), args)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 8])
def test_stacked_layers_of_stages_are_updated_on_their_hosts(x64, layers):
    """One group of layers a stage, and several: what the user has is one array, in the memory of several hosts."""
    step, args = stacked.build(layers, dtype=jnp.float64)
    options = {"num_stages": 2, "num_microbatches": 2, "remat": "none", "offload": "update"}
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), **options)
    plan = fn.plan(*args)
    assert plan.content.stack_groups >= 2 and all(stage.host_bytes for stage in plan.stages)
    moments = {i.path for i in plan.content.inputs if i.path.startswith(("state[1]['layers']", "state[2]['layers']"))}
    assert moments and moments <= on_host(plan)
    (there, _), (wanted, _) = trained(fn, args), trained(jax.jit(step), args)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there[1]["layers"])} == {PINNED_HOST}
    again = parallelize(step, plan=Plan.from_json(plan.to_json()))
    for a, b in zip(jax.tree.leaves(trained(again, args, 1)), jax.tree.leaves(trained(fn, args, 1)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "computes"), [(16e9, True), (1e13, False)], ids=["slow", "fast"])
def test_auto_chooses_by_price_who_updates_stages(bandwidth, computes):
    """As for one stage: over a slow link the hosts of stages update, over a fast one moments move."""
    step, args = build(OPTIMIZERS["adamw"], jnp.float32, width=512, layers=4, batch=8)
    options = {"num_stages": 2, "num_microbatches": 1, "remat": "none", "donate_argnums": 0}
    options["cluster"] = two_devices(bandwidth)
    plain = parallelize(step, **options).plan(*args)
    roomy = parallelize(step, offload="auto", **options).plan(*args)
    assert not stages_there(roomy) and not on_host(roomy)
    options["memory_limit"] = int(0.7 * plain.peak_memory)
    named = parallelize(step, offload="update", **options).plan(*args)
    plan = parallelize(step, offload="auto", **options).plan(*args)
    assert stages_there(plan) == ({0, 1} if computes else set()) and on_host(plan)
    assert plan.peak_memory <= options["memory_limit"]
    assert plan.step_time <= named.step_time * (1 + 1e-9)


def stages_there(plan):
    """Stages some of whose operators hosts compute."""
    return {n for n, part in enumerate(plan.content.parts) if any(o.on_host for o in part.operators)}


def test_other_words_are_refused():
    with pytest.raises(AutoparError, match="not a use of host memory"):
        parallelize(lambda x: x, offload="gradients")


@pytest.mark.slow
def test_arguments_of_a_compiled_tpu_program_are_on_the_host():
    pytest.importorskip("libtpu")
    target = "tpu:v5e:2x2"
    cluster = with_hosts(parse_target(target).cluster(), 16e9)
    step, args = gpt.build(
        abstract=True, layers=2, hidden=512, heads=8, vocab=4096, seq=256, batch=16, dtype="bfloat16"
    )
    options = {"cluster": cluster, "donate_argnums": 0, **OPTIONS}
    plans = {off: parallelize(step, offload=off, **options).plan(*args) for off in ("none", "update")}
    plain, there = (verify(plan, step, *args, target=target).compiled_memory for plan in plans.values())
    assert there.arguments < 0.02 * plain.arguments
    assert there.temporaries < 1.1 * plain.temporaries
