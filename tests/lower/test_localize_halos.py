"""Convolutions and windows split over the dims that windows slide over: edges come from neighbours."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.sharding.halo import Halo, HaloExchange, messages
from tests.lower.harness import MESHES, check_localized

X = MESHES[1:2]
IMAGES = ("NHWC", "HWIO", "NHWC")


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float64)


def spatial(ran: list[Any], operand: int, *dims: int) -> set[int]:
    """Of ``dims`` of an operand those that some strategy split with an exchange."""
    return {e.dim for s in ran for e in s.exchanges if e.operand == operand} & set(dims)


@st.composite
def halos(draw: st.DrawFn) -> Halo:
    """Windows over a dim, as many as there are from one padding to the other."""
    size, step, extent = draw(st.integers(1, 24)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    dilation, low, high = draw(st.integers(1, 3)), draw(st.integers(-2, 4)), draw(st.integers(-2, 4))
    room = (size - 1) * dilation + 1 + low + high - extent
    return Halo(size, room // step + 1 if room >= 0 else 0, step, extent, low, dilation)


@settings(max_examples=300)
@given(halos(), st.sampled_from((1, 2, 3, 4, 8)))
def test_what_a_piece_gets_is_what_its_windows_cover(halo: Halo, pieces: int) -> None:
    """By counting: the elements under the windows of each piece, one by one."""
    reach = halo.reach(pieces)
    if reach is None:
        return
    own, windows = halo.size // pieces, halo.count // pieces
    for n in range(pieces):
        got = n * own - reach.left + reach.starts[n]
        inside = reach.starts[n] >= 0 and reach.starts[n] + reach.width <= reach.left + own + reach.right
        assert inside and reach.left <= own and reach.right <= own
        first = n * windows * halo.step - halo.pad
        last = first + (windows - 1) * halo.step + halo.extent - 1
        under = [i for i in range(-50, 100) if first <= i * halo.dilation <= last]
        assert under == list(range(got, got + reach.width))
        assert (under[0] * halo.dilation - first, last - under[-1] * halo.dilation) == (reach.low, reach.high)
        assert reach.outside or all(0 <= i < halo.size for i in under)


def test_edges_that_are_sent() -> None:
    """A piece of 4 x 6 with 3 features: 2 rows of 6, then columns of 4 + 2 rows: corners come with them."""
    exchanges = (HaloExchange(0, 0, ("x",), 1, 1), HaloExchange(0, 1, ("y",), 2, 0))
    assert messages(exchanges, 0, (4, 6, 3)) == [(18, ("x",)), (18, ("x",)), (36, ("y",))]
    assert messages(exchanges, 1, (4, 6, 3)) == []


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    """Images whose height 2, 4 or 8 devices may divide, with windows, strides and dilations of all kinds."""
    groups, count = draw(st.sampled_from((1, 2))), draw(st.sampled_from((8, 16)))
    taps, stride, spread, dilation = (draw(st.integers(1, n)) for n in (5, 3, 2, 2))
    low = draw(st.integers(0, 4))
    # So many elements that there are ``count`` windows, where padding and dilation allow it.
    covered = (count - 1) * stride + (taps - 1) * spread + 1
    size = draw(st.sampled_from((8, 16, 24, 32)))
    high = covered - low - ((size - 1) * dilation + 1)
    if high < -size * dilation:
        low, high = 0, 0
    parameters = {
        "window_strides": (stride, 1),
        "padding": ((low, high), (1, 1)),
        "lhs_dilation": (dilation, 1),
        "rhs_dilation": (spread, 1),
        "dimension_numbers": IMAGES,
        "feature_group_count": groups,
    }
    return floats(1, size, 4, groups), floats(taps, 3, 1, groups, seed=1), parameters


@pytest.mark.few(1)
@pytest.mark.parametrize("part", ["itself", "input gradient", "kernel gradient"])
@settings(max_examples=8)
@given(convolutions())
def test_any_convolution(part: str, case: tuple[Any, Any, dict[str, Any]]) -> None:
    x, w, parameters = case

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, **parameters)

    with jax.enable_x64(True):
        out = jax.eval_shape(conv, x, w)
        if not out.size:
            return
        g = floats(*out.shape, seed=2)
        function = {
            "itself": lambda x, w, g: conv(x, w),
            "input gradient": lambda x, w, g: jax.linear_transpose(lambda v: conv(v, w), x)(g)[0],
            "kernel gradient": lambda x, w, g: jax.linear_transpose(lambda v: conv(x, v), w)(g)[0],
        }[part]
        check_localized(function, x, w, g, primitive="conv_general_dilated", meshes=X, limit=12, least=1, rtol=1e-10)


@pytest.mark.parametrize("part", ["itself", "input gradient", "kernel gradient"])
def test_height_and_width_of_an_image(part: str) -> None:
    """Both split: corners come from diagonal neighbours."""
    x, w = floats(1, 8, 8, 2), floats(3, 3, 2, 2, seed=1)

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=IMAGES)

    function = {
        "itself": lambda x, w: conv(x, w),
        "input gradient": lambda x, w: jax.grad(lambda v: (conv(v, w) * x).sum())(x),
        "kernel gradient": lambda x, w: jax.grad(lambda v: (conv(x, v) * x).sum())(w),
    }[part]
    with jax.enable_x64(True):
        ran = check_localized(function, x, w, primitive="conv_general_dilated", meshes=X, limit=60, rtol=1e-10)
    assert any(len({e.dim for e in s.exchanges}) == 2 for s in ran)


@st.composite
def pools(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """Windows of any size, stride and padding over the height of an image."""
    taps, stride, count = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from((4, 8, 16)))
    spread = draw(st.integers(1, 2))
    low = draw(st.integers(0, 2))
    size = draw(st.sampled_from((8, 16, 24)))
    high = (count - 1) * stride + (taps - 1) * spread + 1 - low - size
    padding = (low, high) if high >= 0 else (0, 0)
    return floats(1, size, 4, 2), {
        "window_dimensions": (1, taps, 2, 1),
        "window_strides": (1, stride, 2, 1),
        "window_dilation": (1, spread, 1, 1),
        "padding": ((0, 0), padding, (0, 0), (0, 0)),
    }


@st.composite
def pads(draw: st.DrawFn) -> tuple[Any, tuple[int, int, int]]:
    """A dim that is padded, or cut, before, behind and between its elements, so that devices divide it again."""
    size, between = draw(st.sampled_from((8, 16, 24, 32))), draw(st.integers(0, 2))
    low, spread = draw(st.integers(-4, 9)), (size - 1) * (between + 1) + 1
    high = draw(st.integers(-4, 9))
    return floats(size, 4), (low, high + (-(spread + low + high)) % draw(st.sampled_from((2, 4, 8))), between)


@pytest.mark.parametrize("value", [pytest.param(0.0, marks=pytest.mark.slow), -np.inf])
@settings(max_examples=8)
@given(pads())
def test_any_padding(value: float, case: tuple[Any, tuple[int, int, int]]) -> None:
    x, config = case
    with jax.enable_x64(True):
        if x.shape[0] + config[0] + config[1] <= 0:
            return
        check_localized(
            lambda x: lax.pad(x, np.float64(value), (config, (0, 0, 0))),
            x,
            primitive="pad",
            meshes=X,
            limit=12,
            least=1,
            rtol=1e-10,
        )


def test_padding_is_sent_by_neighbours() -> None:
    """16 elements more on either side of 64: the outermost of 8 devices have none of the 12 that are theirs then."""
    for amount, sent in ((4, True), (16, False)):
        ran = check_localized(
            lambda x, n=amount: lax.pad(x, np.float64(1), ((n, n, 0),)), floats(64), primitive="pad", meshes=MESHES[:1]
        )
        assert bool(spatial(ran, 0, 0)) == sent


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 6), st.integers(1, 3), st.sampled_from((8, 16)), st.integers(0, 8))
def test_any_slice(start: int, stride: int, count: int, rest: int) -> None:
    limit = start + (count - 1) * stride + 1
    x = floats(-(-(limit + rest) // 8) * 8, 4)
    with jax.enable_x64(True):
        check_localized(
            lambda x: lax.slice(x, (start, 0), (limit, 4), (stride, 1)),
            x,
            primitive="slice",
            meshes=X,
            limit=12,
            least=1,
            rtol=1e-10,
        )


INITIAL = {"max": (-np.inf, lax.max), "min": (np.inf, lax.min), "sum": (0.0, lax.add)}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(INITIAL))
@settings(max_examples=8)
@given(pools())
def test_any_pooling(name: str, case: tuple[Any, dict[str, Any]]) -> None:
    x, parameters = case
    with jax.enable_x64(True):
        check_localized(
            lambda x: lax.reduce_window(x, *INITIAL[name], **parameters),
            x, primitive=f"reduce_window_{name}", meshes=X, limit=12, least=1, rtol=1e-10,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["max", "min"])
def test_integers_beyond_the_ends_have_no_part(name: str) -> None:
    sign = {"max": -1, "min": 1}[name]
    x = sign * np.arange(100, 164, dtype=np.int32).reshape(1, 16, 4, 1)  # zeros would win
    combine = {"max": lax.max, "min": lax.min}[name]
    ran = check_localized(
        lambda x: lax.reduce_window(
            x, np.int32(sign * (2**31 - 1)) - (name == "max"), combine, (1, 3, 1, 1), (1, 1, 1, 1), "SAME"
        ),
        x, primitive=f"reduce_window_{name}", meshes=X,
    )  # fmt: skip
    assert spatial(ran, 0, 1) == {1}


@pytest.mark.parametrize(("window", "stride", "padding"), [pytest.param(2, 2, 0, marks=pytest.mark.slow), (3, 1, 1)])
def test_gradient_of_the_largest(window: int, stride: int, padding: int) -> None:
    """Of windows on one shard, and of those that lie on neighbours' and beyond the ends."""
    x = floats(1, 16, 4, 2)

    def pool(x: Any) -> Any:
        lengths = (1, window, 2, 1), (1, stride, 2, 1)
        return lax.reduce_window(x, -np.inf, lax.max, *lengths, ((0, 0), (padding, padding), (0, 0), (0, 0)))

    with jax.enable_x64(True):
        ran = check_localized(
            jax.grad(lambda x: (pool(x) ** 2).sum()), x, primitive="select_and_scatter_add", meshes=X, rtol=1e-10
        )
    assert any(s.operand_layouts[1].dims[1] for s in ran)


def test_windows_of_two_pieces_send_gradients_back() -> None:
    """16 windows of 3 over 18 elements on 2 devices: the inner edges travel, nothing lies beyond the ends."""
    x = floats(1, 18, 2, 2)

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), "VALID")

    with jax.enable_x64(True):
        ran = check_localized(
            jax.grad(lambda x: (pool(x) ** 2).sum()), x, primitive="select_and_scatter_add", meshes=X, rtol=1e-10
        )
    assert any(e.returns and e.dim == 1 for s in ran for e in s.exchanges)
