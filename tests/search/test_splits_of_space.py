"""A constraint that splits images over space holds along the chain of operators, at every size and on every mesh."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api.constraints import parse_pins
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster
from autopar.search.intra import build
from autopar.search.intra.sharding_problem import SiteDraft
from benchmarks.families import by_adam
from benchmarks.spatial import FAMILIES
from tests.search.problems import f32

#: How often nets halve their images.
LEVELS = {"unet": 1, "pooled": 2, "video": 2}
#: Shards of images, rows and columns, or of clips, frames and rows, by the mesh.
SPLITS = {(8,): [(1, 8)], (2, 4): [(1, 2, 4), (2, 4)]}


@cache
def cluster() -> Cluster:
    """Links on which halos of small images take longer than work that is repeated."""
    return Cluster.load("dgx-a100", nodes=1)


def sites(built: Any, mesh_shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[list[SiteDraft], dict[str, int]]:
    """Operators of the statement under a constraint on the images, and the sizes of the mesh's axes."""
    step, args = built
    (name,) = {"image", "clip", "x"} & args[1].keys()
    axes = {f"axis{n}": size for n, size in enumerate(wanted) if size > 1}
    spec = P(*(f"axis{n}" if size > 1 else None for n, size in enumerate(wanted)))
    pins = parse_pins({f"batch['{name}']": spec}, axes)
    pure = PureFunction(step, ParallelOptions(cluster=cluster(), mesh_shape=mesh_shape, constraints=pins))
    signature, _ = pure.resolve(args, {})
    problem = pure.problem(pure._traced[signature], 10**12)
    (mesh,) = cluster().logical_meshes(mesh_shape)
    return list(build(problem, mesh).sites), dict(mesh.axes)


def image_dims(site: SiteDraft) -> tuple[list[int], list[int]]:
    """Of a convolution the dims of its first operand that are images and space, and the sizes that split with space.

    In the gradient of a kernel images are summed over, in the place of features.
    """
    batch, feature, *space = site.op.ints("lhs_spec")
    taps = [site.types[1].shape[d] for d in site.op.ints("rhs_spec")[2:]]
    counts = [site.op.results[0].type.shape[d] for d in site.op.ints("out_spec")[2:]]
    of_kernel = any(t > c for t, c in zip(taps, counts, strict=True))
    return [feature if of_kernel else batch, *space], [max(*both) for both in zip(taps, counts, strict=True)]


def keeps(site: SiteDraft, wanted: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether every strategy of a convolution splits its images so."""
    dims, _ = image_dims(site)
    return all(
        math.prod(sizes[a] for a in s.operand_layouts[0].dims[d]) == n
        for s in site.strategies
        for d, n in zip(dims, wanted, strict=False)
    )


def divides(site: SiteDraft, wanted: tuple[int, ...]) -> bool:
    """Whether a convolution can be split so."""
    dims, counts = image_dims(site)
    shape = [site.types[0].shape[d] for d in dims]
    sized = [*zip(shape, wanted, strict=False), *zip(counts, wanted[1:], strict=False)]
    return all(size % n == 0 for size, n in sized)


@pytest.mark.parametrize("seed", range(16))
def test_every_convolution_keeps_the_split_of_a_constraint(seed: int) -> None:
    rng = random.Random(seed)
    family = rng.choice(sorted(LEVELS))
    size = rng.choice((16, 32) if family == "video" else (8, 16, 32, 64, 128))
    batch, mesh_shape = rng.choice((1, 2, 4, 8)), rng.choice(sorted(SPLITS))
    wanted = rng.choice([w for w in SPLITS[mesh_shape] if batch % w[0] == 0])
    found, sizes = sites(FAMILIES[family](batch, 8, size), mesh_shape, wanted)
    convolutions = [s for s in found if s.op.primitive == "conv_general_dilated"]
    # A level that has too few rows ends the chain.
    chain = list(takewhile(lambda s: divides(s, wanted), convolutions))
    assert chain and (len(chain) == len(convolutions) or size // 2 ** LEVELS[family] % max(wanted) or family == "video")
    assert [s.id for s in chain if not keeps(s, wanted, sizes)] == []


def test_a_split_of_examples_alone_leaves_the_others_free() -> None:
    found, sizes = sites(FAMILIES["unet"](2, 8, 32), (2, 4), (2,))
    first = next(s for s in found if s.op.primitive == "conv_general_dilated")
    assert not keeps(first, (2,), sizes)


def test_what_no_window_reads_is_free() -> None:
    """Rows of a matrix in products are no space."""

    def loss(p: Any, b: Any) -> Any:
        return (jnp.tanh(b["x"] @ p["w"]) ** 2).mean()

    found, _ = sites(by_adam(loss, {"w": (16, 16)}, {"x": f32(4, 16, 16)}), (8,), (1, 8))
    product = next(s for s in found if s.op.primitive == "dot_general")
    assert len({s.operand_layouts[0] for s in product.strategies}) > 1


def test_the_chain_goes_through_loops() -> None:
    def loss(p: Any, b: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)), None

        return (jax.lax.scan(layer, b["x"], p["w"])[0] ** 2).mean()

    found, sizes = sites(by_adam(loss, {"w": (3, 3, 3, 4, 4)}, {"x": f32(2, 16, 16, 4)}), (8,), (1, 8))
    convolutions = [s for s in found if s.op.primitive == "conv_general_dilated"]
    assert len(convolutions) >= 3 and all(keeps(s, (1, 8), sizes) for s in convolutions)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spec"), [("unet", P(None, "h", "w")), ("video", P("w", "h"))])
def test_values_under_a_split_of_space(family: str, spec: P) -> None:
    step, shapes = FAMILIES[family](2, 4, 16)
    rng = np.random.default_rng(4)
    make = {"f": lambda s: rng.standard_normal(s.shape) / 4, "i": lambda s: np.zeros(s.shape)}
    state, batch = jax.tree.map(lambda s: jnp.asarray(make[s.dtype.kind](s), s.dtype), shapes)
    name = "clip" if family == "video" else "image"
    compiled = autopar.parallelize(
        step, cluster=cluster(), num_stages=1, num_microbatches=1, mesh_axes={"h": 4, "w": 2},
        constraints={f"batch['{name}']": spec},
    ).compile(state, batch)  # fmt: skip
    assert any(c.kind == "collective-permute" for c in compiled.plan.communication)
    (got, loss), (want, wanted_loss) = compiled(state, batch), jax.jit(step)(state, batch)
    np.testing.assert_allclose(loss, wanted_loss, 1e-4)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-2, 1e-4), got[0], want[0])
