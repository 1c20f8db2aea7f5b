"""Images split over height and width: a small U-Net, its values, its halos counted by hand, its predicted time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.lower.hlo import collectives
from autopar.search.intra import build, extract
from autopar.search.intra.edges import there_already
from autopar.solver import solve
from tests.search.problems import f32, problem_of, toy

IMAGES = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=IMAGES, **options)


def block(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    for w in weights:
        y = conv(x, w)
        mean, square = jnp.mean(y, (1, 2, 3), keepdims=True), jnp.mean(y * y, (1, 2, 3), keepdims=True)
        x = jax.nn.relu((y - mean) * lax.rsqrt(square - mean * mean + 1e-5))
    return x


def unet(params: Any, x: jax.Array) -> jax.Array:
    """One level down, strided, dilated and grouped convolutions below, one level up beside what was passed over."""
    top = block(params["down"], x)
    low = lax.reduce_window(top, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    low = low + conv(low, params["dilated"], rhs_dilation=(2, 2), feature_group_count=2)
    low = block(params["low"], low)
    up = lax.conv_transpose(low, params["up"], (2, 2), "SAME", dimension_numbers=IMAGES)
    return conv(block(params["out"], jnp.concatenate([top, up], -1)), params["last"])


def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((unet(p, x) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def shapes(features: int) -> dict[str, Any]:
    n = features
    return {
        "down": ((3, 3, 2, n), (3, 3, n, n)),
        "dilated": (3, 3, n // 2, n),
        "low": ((3, 3, n, 2 * n), (3, 3, 2 * n, 2 * n)),
        "up": (2, 2, 2 * n, n),
        "out": ((3, 3, 2 * n, n),),
        "last": (1, 1, n, 1),
    }


def arguments(size: int, batch: int, features: int, make: Callable[..., Any]) -> tuple[Any, Any, Any]:
    is_shape = lambda s: all(isinstance(n, int) for n in s)  # noqa: E731
    params = jax.tree.map(lambda s: make(*s), shapes(features), is_leaf=is_shape)
    return params, make(batch, size, size, 2), make(batch, size, size, 1)


def drawn(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])))


def parallel(fn: Callable[..., Any], mesh_shape: tuple[int, ...], **options: Any) -> Any:
    given = {"num_stages": 1, "num_microbatches": 1, "mesh_shape": mesh_shape, **options}
    return parallelize_with(fn, ParallelOptions(cluster=toy(8), **given))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(8,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_values_and_gradients(mesh_shape: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        args = arguments(32, 1, 4, drawn(len(mesh_shape)))
        compiled = parallel(train_step, mesh_shape, batch_argnums=(1, 2)).compile(*args)
        halos = [c for c in compiled.plan.communication if c.kind == "collective-permute"]
        assert any("conv_general_dilated" in id for c in halos for id in c.operators)
        got, want = compiled(*args), jax.jit(train_step)(*args)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), got, want)


def layers(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(conv(x, w))
    return x


@pytest.mark.parametrize("taps", [3, 5])
def test_halos_are_those_counted_by_hand(taps: int) -> None:
    """A convolution of 3 rows needs one row on either side, of 5 rows two: of 63 pixels with 4 features in f32."""
    weights, x = (f32(taps, 3, 4, 4),) * 3, f32(1, 64, 63, 4)
    program = parallel(layers, (8,)).compile(weights, x)
    sent = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    edge = taps // 2 * 63 * 4 * 4
    assert Counter((c.full_bytes, c.times) for c in sent) == {(edge, 1.0): 6}
    found = {(c.kind, c.bytes, c.count) for c in program.plan.communication if c.kind == "collective-permute"}
    assert found == {("collective-permute", edge, 6.0)}


@pytest.mark.parametrize("mode", ["reflect", "wrap", pytest.param("symmetric", marks=pytest.mark.slow)])
def test_borders_of_the_image_itself_send_what_zeros_do(mode: str) -> None:
    """A device at an end makes its border, or has it of the one at the other end, whose edge is as large."""

    def bordered(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for w in weights:
            padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode=mode)  # type: ignore[arg-type]
            x = jnp.tanh(lax.conv_general_dilated(padded, w, (1, 1), "VALID", dimension_numbers=IMAGES))
        return x

    weights, x = (f32(3, 3, 4, 4),) * 3, f32(1, 64, 63, 4)
    program = parallel(bordered, (8,)).compile(weights, x)
    sent = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    assert Counter((c.full_bytes, c.times) for c in sent) == {(63 * 4 * 4, 1.0): 6}
    assert {c.kind for c in program.plan.communication} == {"collective-permute"}


def test_an_edge_of_nothing_is_planned() -> None:
    """Padding by the outermost element makes arrays without elements of the dims that it leaves alone."""
    padded = lambda w, x: conv(jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="edge"), w)  # noqa: E731
    w, x = drawn(1)(3, 3, 2, 2), drawn(2)(1, 32, 8, 2)
    got = parallel(lambda w, x: padded(w, x).sum(), (8,)).compile(w, x)(w, x)
    np.testing.assert_allclose(got, padded(w, x).sum(), 1e-4)


def edges(width: int, taken: int, made: int, rows: int, *, of_data: bool = False) -> Counter[int]:
    """Bytes of messages of a convolution of stride 1 in a train step, by hand, in f32.

    ``rows`` of its input on either side go to neighbours in the forward pass, and serve the gradient of its kernel too;
    as many of the gradient of its output in the backward pass, for that of its input, unless this is data.
    """
    return Counter({rows * width * taken * 4: 2}) + Counter({rows * width * made * 4: 0 if of_data else 2})


def test_halos_of_a_train_step_are_those_counted_by_hand() -> None:
    """A U-Net of 64 x 62: rows of 62 pixels on the upper level, of 31 on the lower one.

    Pooling by two, the transposed convolution of 2 x 2 with stride 2 and the one of 1 x 1 have nothing of neighbours.
    """
    n = 4
    params, _, _ = arguments(64, 1, n, f32)
    step = parallel(train_step, (8,), batch_argnums=(1, 2))
    program = step.compile(params, f32(1, 64, 62, 2), f32(1, 64, 62, 1))
    wanted = edges(62, 2, n, 1, of_data=True) + edges(62, n, n, 1)
    wanted += edges(31, n, n, 2)  # 3 rows with a dilation of 2
    wanted += edges(31, n, 2 * n, 1) + edges(31, 2 * n, 2 * n, 1) + edges(62, 2 * n, n, 1)
    sent = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    assert Counter(c.full_bytes for c in sent) == wanted
    assert sum(c.wire_bytes for c in sent) == sum(size * count for size, count in wanted.items()) == 21824
    planned = [c for c in program.plan.communication if c.kind == "collective-permute"]
    assert Counter({c.bytes: c.count for c in planned}) == wanted  # XLA sends once what is the same


def test_what_is_minimized_has_shared_halos_once() -> None:
    """The sum over nodes and edges of the answer is what its operators and collectives take."""
    params, x, y = arguments(64, 1, 4, f32)
    problem = problem_of(train_step, (params, x, y), toy(8))
    (mesh,) = problem.cluster.logical_meshes((8,))
    sharding_problem = build(problem, mesh)
    solution = solve(replace(sharding_problem.problem, limit_bytes=None))
    sharding = extract(problem, sharding_problem, solution.choice)
    assert sum(c.count for c in sharding.communication if c.kind == "collective-permute") == 22
    assert solution.objective == pytest.approx(sharding.compute_s + sharding.communication_s, rel=1e-9)
    shared = [s for s in sharding_problem.sites if there_already(sharding_problem.sites, s, solution.choice)]
    assert len(shared) == 6 and {s.phase for s in shared} == {"backward"}


def crops(x: jax.Array, w: jax.Array) -> jax.Array:
    """Padding and cutting as convolutions without padding of their own have them; every other row at the end."""
    padded = jnp.pad(x, ((0, 0), (4, 4), (0, 0), (0, 0)), constant_values=2.0)
    y = jnp.tanh(conv(padded, w))[:, 4:-4]
    return lax.pad(y, jnp.zeros((), y.dtype), ((0, 0, 0), (0, 1, 1), (0, 0, 0), (0, 0, 0)))[:, ::2]


def test_padding_and_cutting_keep_the_split() -> None:
    """64 rows become 72 and 64 again: no device needs more of its neighbours than half of its rows.

    Five columns are too few for eight devices, padded or not.
    """
    with jax.enable_x64(True):
        x, w = drawn(5)(1, 64, 5, 3), drawn(6)(3, 3, 3, 3)

        def step(w: Any, x: Any) -> Any:
            return jax.grad(lambda w, x: jnp.sum(crops(x, w) ** 2), (0, 1))(w, x)

        compiled = parallel(step, (8,), batch_argnums=(1,)).compile(w, x)
        ids = {id for c in compiled.plan.communication if c.kind == "collective-permute" for id in c.operators}
        assert any("pad" in id for id in ids) and any("slice" in id for id in ids)
        got, want = compiled(w, x), jax.jit(step)(w, x)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), got, want)


def test_few_small_images_are_split_throughout() -> None:
    """Two images of 64 x 64: edges of a split of space and sums of kernels are sent, nothing else."""
    params, x, y = arguments(64, 2, 4, f32)
    plan = autopar.parallelize(train_step, cluster=toy(8), num_stages=1, num_microbatches=1, batch_argnums=(1, 2)).plan(
        params, x, y
    )
    weights = sum(4 * w.size for w in jax.tree.leaves(params))
    sent = Counter[str]()
    for c in plan.communication:
        sent[c.kind] += int(c.count * c.bytes)
    assert sent["all-to-all"] == 0 < sent["collective-permute"]
    statistics = 4 * 2 * 64  # means and squares of images, forward and backward
    assert sent["all-reduce"] + sent["all-gather"] + sent["reduce-scatter"] <= 2 * weights + statistics


def test_cpus_split_columns() -> None:
    """XLA for CPUs takes kernels' gradients of few features and few images slowly where columns have padding.

    Of columns that come with the edges of neighbours it takes them as fast as of many features: four images in two
    parts by columns took 126 ms of CPU time, in two by rows 212, and all images in eight parts 136 to 145.
    """
    params, x, y = arguments(128, 4, 8, f32)
    cluster = autopar.Cluster.load("local-cpu")
    options: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "remat": "none", "batch_argnums": (1, 2)}
    plan = autopar.parallelize(train_step, cluster=cluster, **options).plan(params, x, y)
    _, images, _ = plan.partition_specs()
    assert images[2] is not None
    assert any(c.kind == "collective-permute" for c in plan.communication)


@pytest.mark.slow
def test_one_image_on_eight_devices_takes_little_more_than_an_eighth_of_eight_images() -> None:
    # Starts of kernels and sums of statistics take as long for an image of any size.
    times = []
    for batch in (1, 8):
        args = arguments(2048, batch, 64, f32)
        cluster = autopar.Cluster.load("dgx-h100")
        step = autopar.parallelize(
            train_step, cluster=cluster, num_stages=1, num_microbatches=1, remat="none", batch_argnums=(1, 2)
        )
        times.append(step.plan(*args).step_time)
    assert times[0] <= 1.4 * times[1] / 8


def test_edges_around_the_circle_are_not_those_that_end() -> None:
    """Two convolutions of one image, one with zeros around it: the edges of each are sent, and priced."""

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="wrap")
        around = lax.conv_general_dilated(padded, w, (1, 1), "VALID", dimension_numbers=IMAGES)
        return jnp.tanh(conv(x, w)) + jnp.sin(around)

    program = parallel(both, (8,)).compile(f32(3, 3, 4, 4), f32(1, 64, 63, 4))
    sent = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    planned = [c for c in program.plan.communication if c.kind == "collective-permute"]
    assert sum(c.times for c in sent) == sum(c.count for c in planned) == 4
