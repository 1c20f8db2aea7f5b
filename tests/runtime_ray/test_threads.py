"""Workers as threads of this process: all that driver and workers do, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from autopar.errors import AutoparError, CheckpointError, WorkerLostError
from autopar.runtime.checkpoints import Checkpoints
from autopar.runtime.ray import RemoteArray, RemotePipeline
from tests.runtime_ray.pipelines import Example, example, furthest, kept, numbers, on_threads, trained, trained_plain

pytest.importorskip("flatbuffers")


@pytest.fixture(scope="module")
def mlp() -> Example:
    with jax.enable_x64(True):
        return example("mlp", 2, dtype="float64", layers=2, hidden=16, batch=8)


@pytest.fixture(params=["sockets", "direct"])
def pipeline(mlp: Example, request: pytest.FixtureRequest) -> Iterator[RemotePipeline]:
    with jax.enable_x64(True):
        made = on_threads(mlp, 2, deadline_s=30, transport=request.param)
        yield made
        made.driver.close()


@pytest.mark.few(1)
def test_training_is_that_of_one_device(mlp: Example, pipeline: RemotePipeline) -> None:
    results = trained(mlp, pipeline, 3)
    assert furthest(results, trained_plain(mlp, 3)) < 1e-12


def test_handles_say_what_they_are_and_turn_into_arrays(mlp: Example, pipeline: RemotePipeline) -> None:
    results = trained(mlp, pipeline, 1)
    loss = results[-1]
    assert isinstance(loss, RemoteArray)
    assert loss.shape == ()
    assert float(loss) == loss.item() == np.asarray(loss)
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    weight = next(r for r in results if r.ndim == 2)
    assert "worker" in repr(weight)
    assert "(16, 16)" in repr(weight)
    assert isinstance(weight.to_jax(), jax.Array)
    assert np.array_equal(np.asarray(weight), weight.to_jax())
    with pytest.raises(ValueError, match="copy"):
        np.array(weight, copy=False)


def test_arrays_that_nobody_has_a_handle_to_are_dropped(mlp: Example, pipeline: RemotePipeline) -> None:
    def kept_after(steps: int) -> int:
        results = trained(mlp, pipeline, steps)
        assert results
        return sum(kept(pipeline))

    assert kept_after(3) == kept_after(6)


@pytest.mark.few(1)
def test_inputs_put_before_the_step_lie_on_the_workers_that_read_them(mlp: Example, pipeline: RemotePipeline) -> None:
    placed = pipeline.put(dict(enumerate(mlp.leaves)))
    batch = {n for n, i in enumerate(mlp.source.inputs) if i.name in mlp.source.batch}
    assert placed.keys() == set(range(len(mlp.leaves))) - batch
    leaves = [placed.get(n, leaf) for n, leaf in enumerate(mlp.leaves)]
    assert furthest(pipeline.step(leaves), trained_plain(mlp, 1)) < 1e-12


def test_a_timed_step_is_a_timeline(mlp: Example, pipeline: RemotePipeline) -> None:
    with pytest.raises(AutoparError, match="timed"):
        pipeline.timeline()
    pipeline.step(mlp.leaves, timed=True)
    timeline = pipeline.timeline()
    table = mlp.source.program.table
    assert timeline.origin == "measured"
    for worker, row in enumerate(table.rows):
        order = [(e.kind, e.microbatch) for e in timeline.computing(worker) if e.kind in ("forward", "backward")]
        assert order == [(t.kind, t.microbatch) for t in row]
    assert {e.target for e in timeline.events if e.kind == "send"} == {0, 1}
    assert 0 < timeline.bubble_fraction < 1
    assert '"traceEvents"' in timeline.to_chrome()


def test_a_program_that_fails_is_no_lost_worker(mlp: Example, pipeline: RemotePipeline) -> None:
    leaves = [np.zeros((3, 3)) if np.ndim(x) == 2 else x for x in mlp.leaves]
    with pytest.raises(AutoparError, match="worker 0 failed") as caught:
        pipeline.step(leaves)
    assert not isinstance(caught.value, WorkerLostError)


def test_workers_write_and_read_checkpoints(mlp: Example, pipeline: RemotePipeline, tmp_path: Path) -> None:
    results = trained(mlp, pipeline, 2)
    state, later = results[: mlp.state], mlp.leaves[mlp.state :]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, wait=False)
    following = pipeline.step([*state, *later])  # while it is written
    checkpoints.wait()
    names = sorted(p.name for p in (tmp_path / "step-00000002").iterdir())
    own = [n for n in names if n.startswith("pipeline")]
    assert own == ["pipeline-0-process-0000.bin", "pipeline-0-process-0001.bin"]
    # On workers again, each reads what it needs; and here, whole.
    there = checkpoints.restore(state)
    assert all(isinstance(x, RemoteArray) for x in there)
    here = checkpoints.restore([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state])
    for a, b, c in zip(there, here, state, strict=True):
        assert np.array_equal(np.asarray(a), b)
        assert np.array_equal(np.asarray(c), b)
    again = pipeline.step([*there, *later])
    assert all(numbers(a).tobytes() == numbers(b).tobytes() for a, b in zip(again, following, strict=True))
    damaged = tmp_path / "step-00000002" / own[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=own[1]):
        checkpoints.restore(state)


@pytest.mark.few(1)
def test_workers_make_what_they_read(mlp: Example, pipeline: RemotePipeline) -> None:
    leaves, structure = jax.tree.flatten(mlp.arguments[0])

    def create(key, scale):
        keys = jax.random.split(key, len(leaves))
        return [(jax.random.normal(k, x.shape) * scale).astype(x.dtype) for k, x in zip(keys, leaves, strict=True)]

    arguments = [jax.random.key(5), np.float64(0.5)]
    made = pipeline.make(create, arguments, {n: lambda results, n=n: results[n] for n in range(len(leaves))})
    want = jax.jit(create)(*arguments)
    assert made.keys() == set(range(len(leaves)))
    for n, array in made.items():
        np.testing.assert_allclose(np.asarray(array), want[n], rtol=1e-12)
    results = pipeline.step([*(made[n] for n in range(len(leaves))), *mlp.leaves[len(leaves) :]])
    plain = jax.tree.leaves(jax.jit(mlp.step)(jax.tree.unflatten(structure, want), *mlp.arguments[1:]))
    assert furthest(results, [np.asarray(x) for x in plain]) < 1e-12


def test_programs_write_into_what_nobody_uses_again(mlp: Example, pipeline: RemotePipeline) -> None:
    """Training is the same with it (above); what is sent, and the state, is not written over."""
    memory = [m for name, (_, m) in pipeline.compiled().items() if "update" in name]
    assert memory
    assert all(m["alias_size_in_bytes"] > 0 for m in memory)
    before = [numbers(x).copy() for x in mlp.leaves]
    results = trained(mlp, pipeline, 2)
    kept = [numbers(r).copy() for r in results]
    trained(mlp, pipeline, 1)
    assert all(np.array_equal(numbers(r), k) for r, k in zip(results, kept, strict=True))
    assert all(np.array_equal(numbers(x), b) for x, b in zip(mlp.leaves, before, strict=True))
