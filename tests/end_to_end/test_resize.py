"""Images that are made larger or smaller while their height is split: values, gradients, halos counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.lower.hlo import collectives
from tests.end_to_end.test_space import conv, drawn, edges, parallel
from tests.search.problems import f32


def resized(method: str, factor: float) -> Callable[[jax.Array], jax.Array]:
    """Height and width times ``factor``."""
    return lambda x: jax.image.resize(
        x, (x.shape[0], round(x.shape[1] * factor), round(x.shape[2] * factor), x.shape[3]), method
    )


def step_of(resize: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Convolution, resize, convolution: a train step."""

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(conv(resize(jnp.tanh(conv(x, weights[0]))), weights[1])) ** 2)

    def step(weights: tuple[jax.Array, ...], x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


@pytest.mark.parametrize(
    ("method", "factor", "mesh_shape"),
    [
        ("nearest", 2, (8,)),
        ("bilinear", 2, (8,)),
        pytest.param("nearest", 0.5, (8,), marks=pytest.mark.slow),
        pytest.param("nearest", 3, (2, 4), marks=pytest.mark.slow),
        pytest.param("bilinear", 0.5, (8,), marks=pytest.mark.slow),
        pytest.param("bilinear", 1.5, (8,), marks=pytest.mark.slow),
        pytest.param("cubic", 2, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(method: str, factor: float, mesh_shape: tuple[int, ...]) -> None:
    step = step_of(resized(method, factor))
    with jax.enable_x64(True):
        weights, x = (drawn(1)(3, 3, 4, 4), drawn(2)(3, 3, 4, 4)), drawn(3)(1, 64, 32, 4)
        compiled = parallel(step, mesh_shape, batch_argnums=(1,)).compile(weights, x)
        halos = {id for c in compiled.plan.communication if c.kind == "collective-permute" for id in c.operators}
        assert any("dot_general" in id for id in halos) == (method != "nearest")
        got, want = compiled(weights, x), jax.jit(step)(weights, x)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), got, want)


@pytest.mark.parametrize("method", ["nearest", "bilinear"])
def test_halos_are_those_counted_by_hand(method: str) -> None:
    """64 rows of 62 pixels with 4 features become 128 of 124, in f32.

    Nearest neighbours need no edge. Linear interpolation by two needs one row on either side of what it reads, which
    has 62 pixels: height comes first. Its gradient needs one row on either side too: rows 2 i - 1 to 2 i + 2 of the
    larger image for row i, with a width of 62 again by then.
    """
    args = (f32(3, 3, 4, 4), f32(3, 3, 4, 4)), f32(1, 64, 62, 4)
    program = parallel(step_of(resized(method, 2)), (8,), batch_argnums=(1,)).compile(*args)
    wanted = edges(62, 4, 4, 1, of_data=True) + edges(124, 4, 4, 1)
    if method == "bilinear":
        wanted += Counter({62 * 4 * 4: 4})
    sent = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    assert Counter(c.full_bytes for c in sent) == wanted
    images = [c for c in program.plan.communication if c.bytes >= 64 * 62 * 4 * 4 and c.kind != "collective-permute"]
    assert not images, f"{images} moves an image"
