"""Moments in files: values of the plain optimizer, what the state holds, and what is left where a step fails."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import AutoparError, CheckpointError, ClusterError
from autopar.runtime.ray.cluster import RayCluster
from autopar.transforms import OnDiskState, check_on_disk, moment_files, on_disk
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import assert_trees_same

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda w: w.ndim > 1, p)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2),
    "scheduled lion": lambda: optax.lion(optax.linear_schedule(1e-2, 0.0, 5)),
}


def params(shapes: tuple[tuple[int, ...], ...] = ((16, 24), (24,), (24, 16))) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    return {f"w{i}": jnp.asarray(random.standard_normal(s) / 4) for i, s in enumerate(shapes)}


def batch(seed: int = 1, size: int = 16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((size, 16)))


def loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ p["w0"] + p["w1"]) @ p["w2"] - x) ** 2)


def step_of(tx: Any) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        p, kept = state
        value, grads = jax.value_and_grad(loss)(p, x)
        updates, kept = tx.update(grads, kept, p)
        return (optax.apply_updates(p, updates), kept), value

    return step


def trained(run: Any, state: Any, steps: int = 4) -> Any:
    for seed in range(steps):
        state, value = run(state, batch(seed))
    return state[0], value


@pytest.fixture
def x64_in_all_threads():
    """64-bit floats in callbacks too, which run in threads of their own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


PLANS: dict[str, dict[str, Any]] = {
    "eight devices": {"mesh_shape": (8,), "num_stages": 1, "num_microbatches": 1},
    "microbatches": {"mesh_shape": (4, 2), "num_stages": 1, "num_microbatches": 4},
    "stages": {"num_stages": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_are_those_of_the_plain_optimizer(x64, tmp_path, name):
    plain, tx = OPTIMIZERS[name](), on_disk(OPTIMIZERS[name](), tmp_path / "moments")
    wanted = trained(jax.jit(step_of(plain)), (params(), plain.init(params())))
    assert_trees_same(trained(jax.jit(step_of(tx)), (params(), tx.init(params()))), wanted, rtol=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_values_are_those_of_the_plain_optimizer_on_plans(x64_in_all_threads, tmp_path, name):
    plain, tx = OPTIMIZERS["adamw"](), on_disk(OPTIMIZERS["adamw"](), tmp_path / "moments")
    wanted = trained(jax.jit(step_of(plain)), (params(), plain.init(params())))
    run = autopar.parallelize(step_of(tx), cluster=toy(), **PLANS[name])
    got = trained(run, (params(), tx.init(params())))
    assert_trees_same(got, wanted, rtol=1e-10)


@pytest.mark.slow
def test_a_program_has_no_moments_among_its_arguments(tmp_path):
    weights = sum(w.size for w in params().values()) * 4
    plain, tx = optax.adam(1e-2), on_disk(optax.adam(1e-2), tmp_path / "moments")
    memory = [
        jax.jit(step_of(t)).lower((params(), t.init(params())), batch()).compile().memory_analysis()
        for t in (plain, tx)
    ]
    before, after = (m.argument_size_in_bytes for m in memory)
    assert before - after == 2 * weights  # the count of Adam went, the counter came
    state = on_disk(optax.adam(1e-2), tmp_path / "others").init(params())
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] == [((), jnp.int32)]


def test_a_plan_has_no_moments_among_its_inputs(tmp_path):
    plain, tx = optax.adam(1e-2), on_disk(optax.adam(1e-2), tmp_path / "moments")
    options: dict[str, Any] = {"cluster": toy(1), "num_stages": 1, "num_microbatches": 1}
    held = []
    for t in (plain, tx):
        state = (params(), jax.eval_shape(t.init, params()))
        plan = autopar.parallelize(step_of(t), **options).plan(state, batch())
        held.append({i.path for i in plan.content.inputs})
    assert len(held[0] - held[1]) == 7 and len(held[1] - held[0]) == 1
    assert not (tmp_path / "moments").exists()  # planning writes nothing


def assert_fails(run: Any, state: Any, match: str) -> None:
    """A step that ends with an error of a callback, of which jax tells once more where effects are waited for."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(run(state, batch(7)))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()


class Interrupted:
    """An optimizer that fails at a parameter while ``on`` is set."""

    def __init__(self) -> None:
        self.on, self.inner = False, optax.adam(1e-2)

    def update(self, gradients: Any, state: Any, p: Any) -> Any:
        updates, state = self.inner.update(gradients, state, p)
        if [w.ndim for w in jax.tree.leaves(p)] == [1]:
            state = jax.tree.map(lambda m: jax.pure_callback(self.check, jax.typeof(m), m), state)
        return updates, state

    def check(self, moment: Any) -> Any:
        if self.on:
            raise RuntimeError("interrupted")
        return np.asarray(moment)


def test_a_step_that_fails_leaves_the_last_state(tmp_path):
    broken = Interrupted()
    tx = on_disk(optax.GradientTransformation(broken.inner.init, broken.update), tmp_path / "moments")
    plain = optax.adam(1e-2)
    run, plain_run = jax.jit(step_of(tx)), jax.jit(step_of(plain))
    state, wanted = (params(), tx.init(params())), (params(), plain.init(params()))
    for seed in range(2):
        (state, _), (wanted, _) = run(state, batch(seed)), plain_run(wanted, batch(seed))
    jax.block_until_ready(state)
    broken.on = True
    assert_fails(run, state, "interrupted")
    assert moment_files.versions(tmp_path / "moments") == {"00000": [2, 3], "00001": [2, 1], "00002": [2, 1]}
    broken.on = False
    check_on_disk(state[1], tmp_path / "moments")
    for seed in range(2, 5):
        (state, _), (wanted, _) = run(state, batch(seed)), plain_run(wanted, batch(seed))
    assert_trees_same(state[0], wanted[0], rtol=1e-6)


def test_a_repeated_step_gives_the_same_and_older_ones_are_refused(tmp_path):
    tx = on_disk(optax.adam(1e-2), tmp_path / "moments")
    run = jax.jit(step_of(tx))
    first, _ = run((params(), tx.init(params())), batch())
    jax.block_until_ready(first)
    second = run(first, batch())
    again = run(first, batch())
    jax.tree.map(np.testing.assert_array_equal, again, second)
    third, _ = run(second[0], batch())
    jax.block_until_ready(third)
    for old in (first[1], OnDiskState(jnp.int32(9))):
        with pytest.raises(CheckpointError, match=rf"step {old.version}.* of steps \[2, 3\]"):
            check_on_disk(old, tmp_path / "moments")
    assert_fails(run, first, r"state is of step 1, .* has moments of step 3")
    with pytest.raises(CheckpointError, match=r"of step 1, .* moments of step 3"):
        tx.update(params(), first[1], params())  # outside of a program


def test_a_copied_folder_goes_with_its_checkpoint(tmp_path):
    folder, copy = tmp_path / "moments", tmp_path / "copy"
    tx = on_disk(optax.adam(1e-2), folder)
    run = jax.jit(step_of(tx))
    state, _ = run((params(), tx.init(params())), batch())
    jax.block_until_ready(state)
    shutil.copytree(folder, copy)
    wanted = trained(run, state)
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    check_on_disk(state[1], folder)
    jax.tree.map(np.testing.assert_array_equal, trained(run, state), wanted)


def test_files_are_their_owners_alone(tmp_path, monkeypatch):
    folder = tmp_path / "moments"
    tx = on_disk(optax.adam(1e-2), folder)
    tx.init(params())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in folder.iterdir()) == [f"{i:05d}.{v}" for i in range(3) for v in (0, 1)]
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    (folder / "00001.0").chmod(0o644)
    with pytest.raises(CheckpointError, match=r"00001\.0 is not a file of this user alone"):
        tx.update(params(), OnDiskState(jnp.int32(0)), params())
    folder.chmod(0o755)
    with pytest.raises(AutoparError, match="others can enter it"):
        tx.init(params())
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(AutoparError, match="is a link to one"):
        on_disk(optax.adam(1e-2), tmp_path / "link").init(params())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(AutoparError, match="belongs to another user"):
        tx.init(params())


def test_files_of_another_model_or_run_are_refused(tmp_path):
    folder = tmp_path / "moments"
    tx = on_disk(optax.adam(1e-2), folder)
    state = tx.init(params())
    others = params(((16, 8), (24,), (24, 16)))
    with pytest.raises(CheckpointError, match=r"w0.*\[16, 24\].*the state has.*\[16, 8\]"):
        jax.jit(tx.update)(others, state, others)
    with pytest.raises(CheckpointError, match=r"mu.*the state has.*trace"):
        on_disk(optax.sgd(1e-2, momentum=0.9), folder).update(params(), state, params())
    _, state = tx.update(params(), state, params())
    with pytest.raises(CheckpointError, match="has moments of step 1, and init"):
        tx.init(params())
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="moments are not in"):
        tx.update(params(), state, params())
    with pytest.raises(CheckpointError, match="of no parameter moments"):
        check_on_disk(state, folder)


def test_what_cannot_be_treated_leaf_by_leaf_is_refused(tmp_path):
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    with pytest.raises(AutoparError, match=r"mixes parameters: what it makes of w0 depends on w1, w2"):
        on_disk(mixing, tmp_path / "moments").init(params())
    with pytest.raises(AutoparError, match="random numbers"):
        on_disk(optax.add_noise(0.1, 0.5, 0), tmp_path / "moments").init(params())
    with pytest.raises(AutoparError, match="has no parameters"):
        on_disk(optax.adam(1e-2), tmp_path / "moments").update(params(), OnDiskState(jnp.int32(0)))
    with pytest.raises(AutoparError, match="mixes parameters"):
        on_disk(optax.apply_if_finite(optax.adam(1e-2), 3), tmp_path / "moments").init(params())
    outside = optax.chain(optax.clip_by_global_norm(0.1), on_disk(optax.adam(1e-2), tmp_path / "moments"))
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    wanted = trained(jax.jit(step_of(plain)), (params(), plain.init(params())))
    assert_trees_same(trained(jax.jit(step_of(outside)), (params(), outside.init(params()))), wanted, rtol=1e-5)


def test_several_processes_and_workers_on_ray_are_refused_when_planned(tmp_path, monkeypatch):
    folder = tmp_path / "moments"
    tx = on_disk(optax.adam(1e-2), folder)
    state = params(), jax.eval_shape(tx.init, params())
    cluster = RayCluster("workers", toy(2).groups)
    planned = autopar.parallelize(step_of(tx), cluster=cluster, num_stages=2, num_microbatches=2)
    with pytest.raises(
        ClusterError, match=r"step calls Python 6 times \(io_callback\), and 8 dev(.|\n)*autopar\.transforms\.on_disk"
    ) as error:
        planned.plan(state, batch())
    assert error.value.remedy is not None and error.value.source is not None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    local = autopar.parallelize(step_of(tx), cluster=toy(2), num_stages=1, num_microbatches=1)
    for run in (tx.init, lambda p: local.plan((p, state[1]), batch())):
        with pytest.raises(AutoparError, match=r"on_disk: 2 processes, and files of moments belong to one"):
            run(params())
    assert not folder.exists()


def with_holes(folder: Path) -> None:
    """Writes the files of a folder anew without their zeros, as copies are that look for them."""
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(b"")
        with open(path, "r+b") as file:
            file.truncate(len(data))
            for at in range(0, len(data), 4096):
                if any(data[at : at + 4096]):
                    file.seek(at)
                    file.write(data[at : at + 4096])


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot set room aside")
def test_a_step_on_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch):
    folder, weights = tmp_path / "moments", params(((16, 512), (512,), (512, 16)))
    plain, tx = optax.adam(1e-2), on_disk(optax.adam(1e-2), folder)
    run, plain_run = jax.jit(step_of(tx)), jax.jit(step_of(plain))
    state, wanted = (weights, tx.init(weights)), (weights, plain.init(weights))
    jax.block_until_ready(state)
    before = moment_files.versions(folder)
    with_holes(folder)

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left") as error:
            tx.update(weights, state[1], weights)
        assert "step before" in str(error.value.remedy)
        assert_fails(run, state, "No space left")
    assert moment_files.versions(folder) == before
    check_on_disk(state[1], folder)
    for seed in range(3):
        (state, _), (wanted, _) = run(state, batch(seed)), plain_run(wanted, batch(seed))
    assert_trees_same(state[0], wanted[0], rtol=1e-6)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot set room aside")
def test_moments_that_a_disk_has_no_room_for_are_refused_before_the_first_step(tmp_path):
    resource = pytest.importorskip("resource")
    tx = on_disk(optax.adam(1e-2), tmp_path / "moments")
    leaves, limits = params(((512, 512),)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"2097\d+ bytes of moments cannot be written"):
            tx.init(leaves)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    state = tx.init(leaves)
    check_on_disk(state, tmp_path / "moments")


TYPES = st.sampled_from(["float32", "bfloat16", "float16", "int8"])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=40)
@given(st.lists(st.tuples(SHAPES, TYPES), max_size=4), st.integers(0, 2**31 - 2))
def test_what_is_written_is_read(tmp_path_factory, leaves, version):
    """Layouts do not overlap; arrays of two versions come back to the bit, neither touches the other."""
    folder = Path(tmp_path_factory.mktemp("files"))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in leaves]
    layout = moment_files.file_layout("w", [str(i) for i in range(len(shapes))], shapes)
    assert all(a.end <= b.offset for a, b in zip(layout.places, layout.places[1:], strict=False))
    random = np.random.default_rng(version)
    drawn = [[random.integers(-9, 9, s.shape).astype(s.dtype) for s in shapes] for _ in range(2)]
    moment_files.begin(folder, 3, layout, [np.zeros(s.shape, s.dtype) for s in shapes])
    for n, arrays in enumerate(drawn):
        moment_files.write(folder, 3, layout, version + n, arrays)
    for n, arrays in enumerate(drawn):
        got = moment_files.read(folder, 3, layout, version + n)
        assert [(a.dtype, a.tobytes()) for a in got] == [(a.dtype, a.tobytes()) for a in arrays]
    with pytest.raises(CheckpointError, match=re.escape(f"of step {version + 2}, ")):
        moment_files.read(folder, 3, layout, version + 2)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 4))
def test_drawn_trees_are_updated_as_by_the_plain_optimizer(tmp_path_factory, shapes, steps):
    with jax.enable_x64(True):
        tree = {"a": [jnp.ones(s) for s in shapes[::2]], "b": {"c": tuple(jnp.ones(s[0]) for s in shapes[1::2])}}
        plain = optax.adamw(1e-2)
        tx = on_disk(plain, tmp_path_factory.mktemp("drawn") / "moments")
        states = [plain.init(tree), tx.init(tree)]
        for n in range(steps):
            gradients = jax.tree.map(
                lambda w, n=n: jnp.sin(n + jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape), tree
            )
            (wanted, states[0]), (got, states[1]) = (
                t.update(gradients, s, tree) for t, s in zip((plain, tx), states, strict=True)
            )
            assert_trees_same(got, wanted, rtol=1e-12)
        assert int(states[1].version) == steps
