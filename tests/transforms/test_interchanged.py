"""Microbatches inside of layers: values of the plain step, memory of the device that does not depend on depth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Cluster, parallelize
from autopar.errors import AutoparError
from autopar.transforms import interchanged
from tests.end_to_end.stacked import build
from tests.end_to_end.test_layers_on_host import (
    OPTIONS,
    on_host,
    one_device,
    trained,
    verified_at_depths,
    with_hosts,
)


def assert_near(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "norm"), [((8,), None), ((2, 4), 0.5)])
def test_values_are_those_of_the_plain_step_from_host_memory(mesh, norm):
    plain, args = build(4, batch=32, norm=norm)
    step, _ = build(4, batch=32, norm=norm, microbatches=4)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=mesh, offload="layers", **OPTIONS)
    assert len(on_host(fn.plan(*args))) == 6
    assert_near(trained(fn, args), trained(jax.jit(plain), args))


@pytest.mark.slow
def test_device_memory_does_not_depend_on_depth():
    cluster, batch = one_device(25e9), 1024
    plans = {}
    for layers, count in ((12, 1), (12, 4), (24, 4), (48, 4), (96, 4)):
        step, args = build(layers, batch=batch, microbatches=count)
        plans[layers, count] = parallelize(step, cluster=cluster, offload="layers", **OPTIONS).plan(*args)
    deep = [plans[layers, 4] for layers in (12, 24, 48, 96)]
    assert len({p.peak_memory for p in deep}) == 1
    assert deep[3].stages[0].host_bytes == 8 * deep[0].stages[0].host_bytes
    at_once = plans[12, 1]
    assert deep[0].peak_memory < 0.65 * at_once.peak_memory
    # Parameters cross the link no more often than without microbatches.
    assert deep[0].stages[0].host_time == pytest.approx(at_once.stages[0].host_time)


@pytest.mark.slow
def test_compiled_memory_of_a_tpu_does_not_depend_on_depth():
    verified = verified_at_depths((12, 24, 48, 96), "tpu:v6e:1x1", microbatches=4, width=512, batch=4096)
    for memory in ([v.compiled_memory.total for v in verified], [v.predicted_memory.total for v in verified]):
        assert max(memory) <= 1.01 * min(memory)


@pytest.mark.parametrize(("count", "each", "width", "with_out"), [(1, 3, 2, True), (4, 1, 3, False), (3, 2, 2, True)])
def test_a_layer_and_its_gradients_are_those_of_all_examples(count, each, width, with_out):
    random = np.random.default_rng(count + 7 * each)
    y, w = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((count * each, width), (2, width, width)))

    def layer(values, own):
        made = {"y": jnp.tanh(values["y"] @ own) + values["y"]}
        return made, made["y"].sum(1) if with_out else None

    def loss(of, start, weights):
        last, outs = jax.lax.scan(of, {"y": start}, weights)
        return jnp.sum(last["y"] ** 2) + sum(map(jnp.sum, jax.tree.leaves(outs)))

    wanted, got = (jax.grad(loss, (1, 2))(f, y, w) for f in (layer, interchanged(layer, count)))
    assert_near(got, wanted)
    wanted, got = (jax.lax.scan(f, {"y": y}, w) for f in (layer, interchanged(layer, count)))
    assert_near(got, wanted)


def test_what_has_no_examples_to_deal_out_is_refused():
    def layer(values, own):
        return values, None

    for values in (jnp.zeros((6, 2)), (jnp.zeros((8, 2)), jnp.zeros(())), (jnp.zeros((8, 2)), jnp.zeros((4, 2))), ()):
        with pytest.raises(AutoparError, match="4 microbatches of arrays") as error:
            interchanged(layer, 4)(values, None)
        assert error.value.cause and error.value.remedy
    with pytest.raises(AutoparError, match="0 microbatches"):
        interchanged(layer, 0)
    with pytest.raises(AutoparError, match=r"makes \(\) of 2 examples"):
        interchanged(lambda values, own: (values, values.sum()), 4)(jnp.zeros((8, 2)), None)
