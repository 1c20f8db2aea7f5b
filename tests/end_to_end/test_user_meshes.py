"""Steps with `jax.shard_map` or `jax.pmap` of their own: the values are those of the undecorated step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.frontend.manual.region import is_manual, region
from tests.end_to_end.clusters import FAST, MIDDLE
from tests.end_to_end.compare import assert_same, assert_trees_same
from tests.end_to_end.random_plans import random_plan
from tests.fuzz.check import padded_plan


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    """A user's mesh: the first devices of this process, axes ``p`` and ``q``."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("p", "q")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def mapped(body: Callable[..., Any], mesh: Any, ins: Any, outs: Any, **options: Any) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, **{"check_vma": False, **options})


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def _cond(v: Any) -> Any:
    return lax.cond(lax.axis_index("p") % 2 == 0, lambda w: w + lax.psum(w, "p"), lambda w: -lax.psum(w, "p"), v)


def _loops(v: Any) -> Any:
    rows = lax.scan(lambda c, r: (c + lax.pmean(r, "p"), c * r), jnp.zeros(v.shape[1:]), v)[1]
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + lax.ppermute(s[1], "p", _RING)), (0, rows))[1]


_PAIRS = ((0, 1), (2, 5), (4, 3), (6, 7))
_RING = tuple((k, (k + 1) % 8) for k in range(8))
#: On pieces of shape (8, 16) of an array (64, 16): along one axis of eight devices.
BODIES = MappingProxyType(
    {
        "psum": lambda v: v * lax.psum(v, "p"),
        "psum of a number": lambda v: v * lax.psum(1, "p") + lax.psum(jnp.ones(()), "p"),
        "pmean and pmax": lambda v: lax.pmean(v, "p") + lax.pmax(v, "p") - lax.pmin(jnp.sin(v), "p"),
        "all_gather": lambda v: v + lax.all_gather(v, "p").mean(0),
        "all_gather along a dim": lambda v: v @ lax.all_gather(v, "p", axis=0, tiled=True)[:16].T,
        "all_gather to the end": lambda v: v + lax.all_gather(v, "p", axis=2).sum(2),
        "psum_scatter": lambda v: v + lax.psum_scatter(v, "p", scatter_dimension=0, tiled=True),
        "psum_scatter of a dim": lambda v: v + lax.psum_scatter(v.T @ v[:, :8], "p", scatter_dimension=1),
        "all_to_all": lambda v: lax.all_to_all(v, "p", 1, 0, tiled=True).reshape(v.shape),
        "all_to_all of a dim": lambda v: lax.all_to_all(v, "p", 0, 1).reshape(v.shape),
        "ppermute": lambda v: v + lax.ppermute(v, "p", _RING),
        "ppermute to some": lambda v: v + lax.ppermute(v, "p", ((0, 3), (3, 1), (6, 0))),
        "pshuffle": lambda v: lax.pshuffle(v, "p", (3, 1, 0, 2, 7, 6, 5, 4)),
        "axis_index": lambda v: v * lax.axis_index("p") + lax.axis_size("p"),
        "groups": lambda v: lax.psum(v, "p", axis_index_groups=((0, 3, 5, 6), (1, 2, 4, 7))),
        "gather in groups": lambda v: v + lax.all_gather(v, "p", axis_index_groups=_PAIRS).sum(0),
        "cond": _cond,
        "loops": _loops,
        "remat and jit": lambda v: jax.checkpoint(jax.jit(lambda w: jnp.sin(w) + lax.psum(w, "p")))(v),
        "vmap inside": lambda v: jax.vmap(lambda r: r + lax.psum(r, "p") + lax.all_gather(r, "p").sum(0), 1, 1)(v),
        "randomness": lambda v: v * jax.random.bits(jax.random.fold_in(jax.random.key(0), lax.axis_index("p"))),
        "sorting": lambda v: jnp.sort(v, 0) + lax.top_k(v, 2)[0].sum(-1, keepdims=True),
    }
)  # fmt: skip


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_bodies(part):
    names = sorted(BODIES)[part::4]
    f = mapped(lambda v: {n: BODIES[n](v) for n in names}, mesh_of(8), P("p"), P("p"))
    assert_same(lambda x: jax.tree.map(jnp.sin, f(x)), (array(64, 16),), cluster=FAST, search=random_plan(part))


def _rounds(row: Any, most: Any) -> Any:
    """Number of rounds, which depends on the row, the row after them and the last random number."""

    def turn(s: Any) -> Any:
        key, n, v, _ = s
        key, drawn = jax.random.split(key)
        return key, n + 1, jnp.tanh(v * 0.7 + 0.1), jax.random.uniform(drawn)

    first = (jax.random.key(3), 0, row, jnp.zeros((), row.dtype))
    return lax.while_loop(lambda s: s[1] < most + (jnp.mean(row) > 0), turn, first)[1:]


@pytest.mark.parametrize("shape", [pytest.param((12, 3), marks=pytest.mark.slow), (8, 5, 3)])
def test_a_batch_of_loops(shape):
    """Under ``vmap`` the condition has dims, and a loop that is done before others keeps its values."""

    def rows(v, most):
        run = functools.partial(_rounds, most=most)
        for _ in shape[1:]:
            run = jax.vmap(run)
        return run(v)

    f = mapped(lambda w, v: (rows(w, 2), rows(v, lax.axis_index("p"))), mesh_of(4), (P(), P("p")), (P(), P("p")))
    x = array(*shape)
    assert 0 < (x.mean(-1) > 0).sum() < x[..., 0].size
    assert_same(f, (x, x), cluster=FAST, search=random_plan(1))


@pytest.mark.parametrize("check_vma", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients(check_vma):
    """Data parallelism by hand over one axis, a matrix product split over the other."""

    def body(w, v, x, y):
        hidden = jnp.tanh(x @ lax.all_gather(w, "p", axis=0, tiled=True))
        error = lax.psum(hidden @ v, "q") - y
        return lax.pmean(jnp.mean(error**2), "p"), hidden

    specs = (P("p", "q"), P("q"), P("p"), P("p"))
    f = mapped(body, mesh_of(2, 4), specs, (P(), P("p", "q")), check_vma=check_vma)

    def step(params, x, y):
        (loss, hidden), grads = jax.value_and_grad(lambda p: f(*p, x, y), has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, hidden

    args = ((array(8, 16), array(16, 4)), array(8, 8), array(8, 4))
    search = random_plan(3) if check_vma else "alpa"
    assert_same(step, args, cluster=MIDDLE, mesh_shape=(2, 4), search=search)


def test_two_axes():
    def body(v):
        both = lax.psum(v, ("p", "q")) + lax.all_gather(v, ("q", "p"), axis=0, tiled=True)[:4].sum()
        moved = lax.ppermute(v, ("p", "q"), _RING) + lax.all_to_all(v, ("p", "q"), 1, 1, tiled=True)
        few = lax.psum(v.sum(0), "q") * lax.axis_index(("p", "q"))
        part = lax.psum_scatter(v, ("q", "p"), scatter_dimension=1)
        return both + moved + few, part, lax.pmax(v, "p")

    f = mapped(body, mesh_of(2, 4), P(("q", "p")), (P(("p", "q")), P(("q", "p")), P("q")))
    assert_same(f, (array(32, 8),), cluster=FAST, search=random_plan(2))


@pytest.mark.parametrize("shape", [(1,), (8,)])
def test_meshes_of_any_size(shape):
    f = mapped(
        lambda v: (v + lax.psum(v, "p"), lax.all_gather(v, "p")), mesh_of(*shape), P("p"), (P("p"), P(None, "p"))
    )
    assert_same(f, (array(16, 2),), cluster=MIDDLE)


@pytest.mark.slow
def test_manual_over_one_axis_only():
    f = mapped(lambda v: v + lax.psum(v, "p"), mesh_of(2, 4), P("p"), P("p"), axis_names={"p"})
    assert_same(jax.jit(f), (array(8, 4),), cluster=MIDDLE)


def test_nested():
    mesh = mesh_of(2, 4)
    inner = mapped(lambda v: v + lax.psum(v, "q") + lax.axis_index("q"), None, P("q"), P("q"), axis_names={"q"})
    outer = mapped(lambda v: inner(v) * lax.psum(v, "p"), mesh, P("p"), P("p"), axis_names={"p"})
    assert_same(jax.jit(outer), (array(16, 4),), cluster=MIDDLE)


def test_under_vmap_and_in_a_loop():
    f = mapped(lambda v: v + lax.psum(v, "p"), mesh_of(8), P("p"), P("p"))

    def step(x):
        return lax.scan(lambda c, r: (c + f(r), jax.vmap(f, 1, 1)(jnp.outer(r, c))), jnp.zeros(x.shape[1:]), x)

    assert_same(step, (array(3, 8),), cluster=MIDDLE)


def test_keys():
    def body(keys, v):
        return v + jax.vmap(lambda k: jax.random.uniform(k, v.shape[1:]))(keys)

    f = mapped(body, mesh_of(8), (P("p"), P("p")), P("p"))
    assert_same(f, (jax.random.split(jax.random.key(3), 8), array(8, 4)), cluster=FAST)


@pytest.mark.slow
def test_pmap():
    """One step of data parallelism, as it was written before there was `jax.shard_map`."""

    @functools.partial(jax.pmap, axis_name="d", in_axes=(None, 0))
    def grads(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return lax.pmean(loss, "d"), lax.pmean(g, "d")

    def step(w, x):
        loss, g = grads(w, x)
        return w - 0.1 * g[0], loss

    assert_same(step, (array(4, 2), array(8, 2, 4)), cluster=MIDDLE)


@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 4}])
def test_a_mesh_with_explicit_axes(options):
    """With stages too, where the rows of microbatches are stacked as partial sums."""
    mesh = jax.make_mesh((8,), ("p",), axis_types=(AxisType.Explicit,))
    f = jax.shard_map(lambda v: v * lax.psum(v, "p"), mesh=mesh, in_specs=P("p"), out_specs=P("p"))

    def step(x):
        y = jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, P("p")))
        return jax.sharding.reshard(jnp.sin(f(y) + y), jax.sharding.NamedSharding(mesh, P())).sum(1)

    assert_same(step, (array(8, 4),), cluster=FAST, **options)


def test_a_print_comes_once_a_device(capfd):
    f = mapped(lambda v: (jax.debug.print("sum {}", v.sum()), v)[1], mesh_of(2), P("p"), P("p"))
    autopar.parallelize(f, cluster=MIDDLE)(jnp.ones((2, 4))).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 4.0\nsum 4.0\n"


@pytest.mark.slow
def test_microbatches():
    """Where each microbatch has whole pieces of the user's devices."""
    f = mapped(lambda w, v: lax.pmean(jnp.mean(jnp.tanh(v @ w)), "p"), mesh_of(4), (P(), P("p")), P())

    def step(w, x):
        loss, g = jax.value_and_grad(f)(w, x)
        return w - 0.1 * g, loss

    assert_same(step, (array(4, 2), array(16, 4)), cluster=MIDDLE, num_microbatches=2)


def _with_numbers(w: Any, v: Any) -> Any:
    """Numbers that jax writes into a region with its mesh in their types, beside and inside of a loop."""
    scale = jnp.full((), 0.7, w.dtype) * 0.5
    looped = lax.fori_loop(0, 2, lambda _, u: jnp.tanh(u * 0.7 + scale), w)
    return jnp.tanh(v * 0.7 + jnp.mean(looped) * 0.5) + lax.ppermute(v, "p", _RING)


def _inner(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation."""
    bodies = value if isinstance(value, tuple | list) else (value,)
    return [b.jaxpr if isinstance(b, ClosedJaxpr) else b for b in bodies if isinstance(b, ClosedJaxpr | Jaxpr)]


def _meshes(jaxpr: Any) -> set[Any]:
    """Meshes in the types of all values of a jaxpr, numbers included."""
    atoms = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in (*e.invars, *e.outvars))]
    types = [v.aval for v in atoms] + [jax.typeof(v.val) for v in atoms if isinstance(v, Literal)]
    found = {t.sharding.mesh for t in types if not t.sharding.mesh.empty}
    return found.union(*(_meshes(b) for e in jaxpr.eqns for p in e.params.values() for b in _inner(p)))


def test_a_region_on_whole_arrays_knows_no_mesh():
    """What it makes meets values of the program around, and jax mixes no values of two meshes."""
    f = mapped(_with_numbers, mesh_of(8), (P(), P("p")), P("p"))
    step = jax.value_and_grad(lambda w, v: jnp.sin(f(w, v)).sum(), (0, 1))
    closed = jax.make_jaxpr(step)(array(15), array(8, 3))
    regions = [e for e in closed.jaxpr.eqns if is_manual(e)]
    assert len(regions) == 2
    assert any(_meshes(e.params["jaxpr"]) for e in regions)  # there is something to leave out
    assert [_meshes(region(e).jaxpr) for e in regions] == [set(), set()]


def test_a_region_with_numbers_in_a_program_that_is_traced_again():
    """Dims padded inside, and the gradient's mesh beside that of the region."""
    f = mapped(_with_numbers, mesh_of(8), (P(), P("p")), P("p"))

    def step(w, v):
        return jax.value_and_grad(lambda w, v: jnp.sin(f(w, v)).sum(), (0, 1))(w, v)

    args = (array(15), array(8, 3))
    search = padded_plan(step, args, 3)  # a drawn plan of another form may be faster
    options = ParallelOptions(cluster=MIDDLE, mesh_shape=(2, 4), search=search, num_stages=1, remat="none")
    compiled = parallelize_with(step, options).compile(*args)
    assert compiled.plan.stages[0].form.padded
    assert_trees_same(compiled(*args), jax.jit(step)(*args))


def test_what_cannot_be_batched_is_refused():
    alone = Primitive("alone")
    alone.def_abstract_eval(lambda v: v)
    f = mapped(lambda v: alone.bind(v), mesh_of(8), P("p"), P("p"))
    with pytest.raises(autopar.TraceError, match=r"a shard_map has a alone(.|\n)*at: test_user_meshes.py:\d+"):
        autopar.parallelize(f, cluster=MIDDLE)(jnp.ones((64, 2)))


def _sent(rows, output, starts, lengths, targets):
    """What jax says of ``ragged_all_to_all``, device by device; each argument has a leading dim of devices."""
    result, devices = output.copy(), len(rows)
    for sender in range(devices):
        for n, (start, length, target) in enumerate(zip(starts[sender], lengths[sender], targets[sender], strict=True)):
            to = n // (len(starts[sender]) // devices)
            result[to, target : target + length] = rows[sender, start : start + length]
    return result


@pytest.mark.parametrize(("devices", "slices"), [pytest.param(8, 1, marks=pytest.mark.slow), (4, 2)])
def test_ragged_all_to_all(devices, slices):
    """Experts without a capacity: each device sends rows of any number to each, and gets their gradients back."""
    random = np.random.default_rng(devices)
    lengths = random.integers(0, 4, (devices, devices * slices))
    starts = np.cumsum(lengths, 1) - lengths
    comes = lengths.reshape(devices, devices, slices).swapaxes(0, 1).reshape(devices, -1)  # by receiver
    begins = np.cumsum(comes, 1) - comes
    targets = begins.reshape(devices, devices, slices).swapaxes(0, 1).reshape(devices, -1)
    most = max(lengths.sum(1).max(), comes.sum(1).max()) + 3
    rows, output = (random.standard_normal((devices, most, 2)) for _ in range(2))
    numbers = [a.astype(np.int32) for a in (starts, lengths, targets, comes)]

    def body(v, there, *offsets):
        return lax.ragged_all_to_all(v[0], there[0], *(o[0] for o in offsets), axis_name="p")[None]

    f = mapped(body, mesh_of(devices), P("p"), P("p"))
    want = _sent(rows, output, *numbers[:3])
    with jax.enable_x64(True):
        got = autopar.parallelize(f, cluster=MIDDLE)(rows, output, *numbers)
        np.testing.assert_array_equal(got, want)

        def step(v, there, scale, *offsets):
            return jax.grad(lambda v: (jnp.sin(f(v, there, *offsets)) * scale).sum())(v)

        scale = random.standard_normal(output.shape)
        gradient = autopar.parallelize(step, cluster=MIDDLE)(rows, output, scale, *numbers)
    back = np.zeros_like(rows)
    for sender in range(devices):
        for n, (start, length, target) in enumerate(zip(*(a[sender] for a in numbers[:3]), strict=True)):
            here, there = slice(start, start + length), slice(target, target + length)
            back[sender, here] = (np.cos(want) * scale)[n // slices, there]
    np.testing.assert_allclose(gradient, back, 1e-12, 1e-14)


def test_data_parallelism_by_hand_costs_what_ours_costs():
    """The user's mesh axis is a dim like any other: split over the plan's devices, it needs the same all-reduces."""
    f = mapped(lambda w, v: lax.pmean(jnp.mean(jnp.tanh(v @ w)), "p"), mesh_of(8), (P(), P("p")), P(), check_vma=True)

    def step(w, x):
        loss, g = jax.value_and_grad(f)(w, x)
        return w - 0.1 * g, loss

    args = (array(4, 2), array(16, 4))
    plan = autopar.parallelize(step, cluster=MIDDLE, search="data-parallel").plan(*args)
    assert sorted((c.kind, c.bytes) for c in plan.communication) == [("all-reduce", 4), ("all-reduce", 32)]
    assert autopar.check(step, *args, cluster=MIDDLE).ok
