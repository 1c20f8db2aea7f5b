"""Where a device's piece lies, and which localizer a primitive gets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from autopar._compat.primitives import bind
from autopar.ir import Layout, TensorType
from autopar.lower.localize import LocalContext, localize
from autopar.lower.localize.base import DeviceAxes, permuted
from autopar.lower.localize.registry import LOCALIZERS
from autopar.sharding import Rule, Strategy, register_rule, unregister_rule
from autopar.sharding.registry import BUILT_IN
from tests.lower.harness import MESHES, check_localized

SIZES = {"x": 2, "y": 4}


def context(layout: Layout, shape: tuple[int, ...]) -> LocalContext:
    type = TensorType(shape, "f32")
    return LocalContext(SIZES, (type,), (type,), (layout,), (layout,))


@pytest.mark.parametrize("axes", [(), ("x",), ("y",), ("x", "y"), ("y", "x")])
def test_piece_start_is_where_jax_puts_the_piece(axes: tuple[str, ...]) -> None:
    here = context(Layout(((), axes)), (3, 16))
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def start(x: Any) -> Any:
        # The first element of this device's piece names its own index.
        assert x.shape == here.operand_shape(0) == here.result_shape()
        return jnp.stack([x[0, 0], here.operand_start(0, 1), here.result_start(0, 1), here.result_start(0, 0)])[None]

    whole = np.broadcast_to(np.arange(16, dtype=np.int32), (3, 16))
    run = jax.shard_map(
        start, mesh=mesh, in_specs=PartitionSpec(None, axes or None), out_specs=PartitionSpec(("x", "y"))
    )
    found = np.asarray(jax.jit(run)(whole))
    assert found.shape == (8, 4)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    np.testing.assert_array_equal(found[:, 0], found[:, 2])
    np.testing.assert_array_equal(found[:, 3], 0)


@pytest.mark.slow
def test_is_split() -> None:
    assert context(Layout(((), ("x",))), (3, 16)).is_split
    assert not context(Layout(((), ()), ("x",)), (3, 16)).is_split


def test_primitives_without_a_localizer_run_unchanged() -> None:
    assert "exp" not in LOCALIZERS
    (got,) = localize(lax.exp_p, {"accuracy": None}, [np.float32(1)], context(Layout(()), ()))
    np.testing.assert_allclose(got, np.e, rtol=1e-6)


def test_bind_gives_a_list() -> None:
    assert len(bind(lax.neg_p, {}, [np.float32(1)])) == 1
    assert len(bind(lax.sort_p, {"dimension": 0, "is_stable": True, "num_keys": 1}, [np.arange(3), np.arange(3)])) == 2


def test_every_localizer_has_a_rule() -> None:
    """A primitive that runs whole needs no localizer: one without a rule is a misspelt name."""
    assert sorted(LOCALIZERS.keys() - BUILT_IN.keys()) == []


def test_the_harness_finds_a_wrong_rule() -> None:
    """``exp`` is not linear: a rule that says so must not pass."""

    def linear(op: Any, types: Any) -> Rule:
        return Rule((), tuple((None,) * t.rank for t in types), ((None,) * types[0].rank,), ((0,),))

    register_rule("exp", linear)
    try:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check_localized(jnp.exp, np.ones((2, 2), np.float32), meshes=MESHES[:1])
    finally:
        unregister_rule("exp")


def test_the_harness_asks_for_strategies() -> None:
    with pytest.raises(AssertionError, match="only 1 strategies"):
        ran: list[Strategy] = check_localized(jnp.exp, np.ones((3,), np.float32), meshes=MESHES[:1])
        assert ran


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y")])
def test_gathers_receive_what_permutes_do(axes: tuple[str, ...], seed: int) -> None:
    """Any pairs, of some devices or of all; the first half of the devices calls the gather alone, in a branch."""
    mesh = jax.make_mesh((2, 2, 2), ("half", "x", "y"), axis_types=(AxisType.Auto,) * 3)
    number = 2 ** len(axes)
    draw = np.random.default_rng(seed)
    senders, receivers = draw.permutation(number), draw.permutation(number)
    pairs = [(int(a), int(b)) for a, b in zip(senders, receivers, strict=True)][: draw.integers(1, number + 1)]
    gathers = DeviceAxes({a: (a,) for a in axes}, gathers=True)

    def device(x: Any) -> Any:
        branches = [lambda y: permuted(y, axes, pairs, gathers), lambda y: y]
        return permuted(x, axes, pairs, lax.axis_index), lax.switch(lax.axis_index("half"), branches, x)

    spec = PartitionSpec(("half", "x", "y"))
    x = draw.normal(size=(8, 3)).astype(np.float32)
    want, got = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))(x)
    np.testing.assert_array_equal(got[:4], want[:4])
    np.testing.assert_array_equal(got[4:], x[4:])
