"""Every example trains to the same values on 8 devices as on one."""

from __future__ import annotations

import jax
import pytest

from examples import gpt, llama, mlp, moe, wide_resnet
from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.compare import assert_same
from tests.end_to_end.random_plans import random_plan

MESHES = [(8,), (2, 4), (4, 2)]
TEXT = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}


def case(name):
    """``(build, overrides)`` of a small instance."""
    return {
        "mlp": (mlp.build, {}),
        "mlp adam": (mlp.build, {"optimizer": "adam"}),
        "gpt": (gpt.build, TEXT),
        "gpt dropout": (gpt.build, {**TEXT, "dropout": 0.1, "masked": True}),
        "llama": (llama.build, {**TEXT, "layers": 2, "kv_heads": 2}),
        "moe gshard": (moe.build, {"gate": "gshard"}),
        "moe switch": (moe.build, {"gate": "switch"}),
        "wide_resnet": (wide_resnet.build, {}),
        "small resnet": (wide_resnet.build, {"stages": (1,), "base_channels": 8, "groups": 2, "image": 8}),
    }[name]


def compare(name, mesh_shape, steps=3, **options):
    build, overrides = case(name)
    with jax.enable_x64(True):
        fn, args = build(dtype="float64", **overrides)
        return assert_same(fn, args, steps=steps, rtol=1e-10, mesh_shape=mesh_shape, cluster=MIDDLE, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("name", ["mlp", "mlp adam"])
def test_mlp_in_float64(name, mesh_shape):
    compare(name, mesh_shape, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "moe gshard", "moe switch", "small resnet"])
def test_models_in_float64_on_2x4(name):
    compare(name, (2, 4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "llama", "moe gshard", "moe switch", "wide_resnet"])
def test_models_in_float64(name, mesh_shape):
    compare(name, mesh_shape, steps=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "moe gshard", "moe switch", "wide_resnet"])
def test_losses_in_float32(name):
    build, overrides = case(name)
    fn, args = build(**overrides)
    assert_same(fn, args, steps=5, loss_rtol=1e-5, mesh_shape=(2, 4), cluster=MIDDLE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_of_the_mlp(seed):
    compare("mlp", None, steps=2, search=random_plan(seed))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "llama", "moe gshard", "moe switch", "wide_resnet"])
def test_random_plans_of_models(name, seed):
    compare(name, None, steps=1, search=random_plan(seed))
