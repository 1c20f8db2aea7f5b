"""Several functions and signatures on the workers of one cluster: whose values are whose."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, ClusterError
from autopar.runtime.ray import RemoteArray
from autopar.runtime.transport import WorkerLink
from examples.mlp import build
from tests.runtime_ray.pipelines import FragileWorkerGroup, furthest, numbers, thread_cluster

pytest.importorskip("flatbuffers")

SIZES = {"layers": 4, "hidden": 16, "batch": 8}


def batch_of(count: int, seed: int = 0) -> dict[str, Any]:
    _, (_, batch) = build("tiny", **{**SIZES, "batch": count})
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), batch)


def close_to(got: Any, want: Any) -> bool:
    return furthest(jax.tree.leaves(got), [numbers(x) for x in jax.tree.leaves(want)]) < 1e-5


def scaled(state: Any, factor: float) -> Any:
    return jax.tree.map(lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.inexact) else x, state)


def eval_step(state: Any, batch: Any) -> Any:
    """A function of the same state that is cut in another way: the mean square of everything it is given."""
    total = sum(jnp.mean(jnp.square(x.astype("float32"))) for x in jax.tree.leaves(state))
    return total + sum(jnp.mean(jnp.square(x.astype("float32"))) for x in jax.tree.leaves(batch))


@pytest.mark.slow
def test_a_handle_of_another_function_is_its_own_value() -> None:
    fn, (state, batch) = build("tiny", **SIZES)

    def other(state: Any, batch: Any) -> Any:
        return fn(state, batch)

    with thread_cluster(2, 2, deadline_s=60) as cluster:
        first = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        second = autopar.parallelize(other, cluster=cluster, num_microbatches=2)
        mine = first.shard(state, batch)[0]
        theirs = second.shard(scaled(state, 0.5), batch)[0]
        assert close_to(second(mine, batch), jax.jit(fn)(state, batch))
        assert close_to(first(theirs, batch), jax.jit(fn)(scaled(state, 0.5), batch))
        assert len(cluster.worker_groups) == 1


@pytest.mark.slow
def test_batches_of_several_sizes_share_a_state() -> None:
    fn, (state, _) = build("tiny", **SIZES)
    plain = jax.jit(fn)
    with thread_cluster(2, 2, deadline_s=60) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, want = state, state
        for count in (8, 4, 8, 4):
            mine, _ = function(mine, batch_of(count))
            want, _ = plain(want, batch_of(count))
        assert close_to(mine, want)
        assert len(cluster.worker_groups) == 1


def test_a_function_with_other_stages_takes_the_state_as_it_is() -> None:
    """Other stages, another number of stages (which regroups the workers), and layers in other groups."""
    fn, (state, batch) = build("tiny", **SIZES)
    plain = jax.jit(fn)
    with thread_cluster(2, 2, deadline_s=60) as cluster:
        train = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        fewer = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=1)
        more = autopar.parallelize(fn, cluster=cluster, num_microbatches=4, num_stages=4)
        mine, want = train.shard(state, batch)[0], state
        for function in (train, more, fewer, train):
            mine, _ = function(mine, batch)
            want, _ = plain(want, batch)
        assert close_to(mine, want)


@pytest.mark.slow
def test_evaluation_shares_the_state_of_training() -> None:
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=60) as cluster:
        train = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        evaluate = autopar.parallelize(eval_step, cluster=cluster, num_microbatches=1)
        mine, _ = train(state, batch)
        want, _ = jax.jit(fn)(state, batch)
        assert float(evaluate(mine, batch)) == pytest.approx(float(jax.jit(eval_step)(want, batch)), rel=1e-5)
        mine, _ = train(mine, batch)
        assert close_to(mine, jax.jit(fn)(want, batch)[0])


def test_a_function_that_is_dropped_frees_its_programs() -> None:
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=60, recover=True) as cluster:
        kept = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        dropped = autopar.parallelize(lambda s, b: fn(s, b), cluster=cluster, num_microbatches=2)
        mine, _ = dropped(state, batch)
        mine, _ = kept(mine, batch)
        group = cluster.worker_groups[-1]
        assert isinstance(group, FragileWorkerGroup)
        assert [len(h._functions) for h in group._hosts] == [2, 2]
        del dropped
        gc.collect()
        kept(mine, batch)
        assert [len(h._functions) for h in group._hosts] == [1, 1]


def test_handles_of_other_and_of_closed_clusters_are_errors() -> None:
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=60) as cluster, thread_cluster(2, 2, deadline_s=60) as other:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        elsewhere = autopar.parallelize(fn, cluster=other, num_microbatches=2)
        mine, metrics = function(state, batch)
        with pytest.raises(ClusterError, match="of another cluster"):
            elsewhere(mine, batch)
        weight = next(x for x in jax.tree.leaves(mine) if x.ndim == 2)
        assert isinstance(weight, RemoteArray)
    with pytest.raises(ClusterError, match="was closed"):
        np.asarray(weight)
    with pytest.raises(ClusterError, match="was closed"):
        function(mine, batch)
    assert float(metrics["loss"]) > 0  # it came with the step


@pytest.mark.slow
def test_threads_that_call_one_function_take_turns() -> None:
    fn, (state, _) = build("tiny", **SIZES)
    batches = [batch_of(8, seed) for seed in range(3)]
    plain = jax.jit(fn)
    with thread_cluster(2, 2, deadline_s=60) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        start = function.shard(state, batches[0])[0]
        got: dict[int, Any] = {}
        failed: list[BaseException] = []

        def run(number: int) -> None:
            try:
                mine = start
                for _ in range(4):
                    mine, _ = function(mine, batches[number])
                got[number] = mine
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        for number, batch in enumerate(batches):
            want = state
            for _ in range(4):
                want, _ = plain(want, batch)
            assert close_to(got[number], want)


def test_a_step_that_fails_leaves_nothing_for_the_next() -> None:
    """One stage sent what the other, which failed, never took: the next step must not take it for its own."""
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=60) as cluster:
        compiled = autopar.parallelize(fn, cluster=cluster, num_microbatches=2).compile(state, batch)
        mine, _ = compiled(state, batch)
        group = cluster.worker_groups[-1]
        assert isinstance(group, FragileWorkerGroup)
        functions = group._hosts[-1]._functions
        ((number, whole),) = functions.items()
        broken = {work: dataclasses.replace(ready, function=fail) for work, ready in whole.programs.items()}
        functions[number] = dataclasses.replace(whole, programs=broken)
        with pytest.raises(AutoparError, match="failed at"):
            compiled(mine, batch_of(8, 5))
        functions[number] = whole
        want, _ = jax.jit(fn)(state, batch)
        assert close_to(compiled(mine, batch), jax.jit(fn)(want, batch))


def test_an_array_that_did_not_arrive_is_sent_again() -> None:
    """A step fails while arrays of another function's workers are on their way: the next one has them sent."""
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=20) as cluster:
        train = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, _ = train(state, batch)
        group = cluster.worker_groups[-1]
        assert isinstance(group, FragileWorkerGroup)
        loaded = [h._functions for h in group._hosts]
        evaluate = autopar.parallelize(eval_step, cluster=cluster, num_microbatches=1).compile(state, batch)
        number = max(loaded[0])
        assert len(loaded[0]) == 2
        whole = [functions[number] for functions in loaded]
        for functions, function in zip(loaded, whole, strict=True):
            functions[number] = dataclasses.replace(function, link=_BrokenLink())
        with pytest.raises(AutoparError, match="on purpose"):
            evaluate(mine, batch)
        for functions, function in zip(loaded, whole, strict=True):
            functions[number] = function
        want = jax.jit(eval_step)(jax.jit(fn)(state, batch)[0], batch)
        assert float(evaluate(mine, batch)) == pytest.approx(float(want), rel=1e-5)


class _BrokenLink(WorkerLink):
    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        raise RuntimeError("on purpose")

    def receive(self, source: int, tag: int, sharding: Any) -> Any:
        raise RuntimeError("on purpose")

    def has_room(self, to: int) -> bool:
        return True

    def ready(self, source: int) -> bool:
        return True


def fail(*arguments: Any) -> Any:
    raise RuntimeError("on purpose")
