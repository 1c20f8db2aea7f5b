"""Pipelines without a flush, through the door that users take, against one device that follows the version map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import Cluster
from autopar.cluster import Device, LinkSpec, NodeGroup
from autopar.schedule.without_flush.schedules import VersionMap, flushes
from tests.runtime.stale_models import MODELS, replay, step_of

#: How stages are sharded: planning is no subject here, and this takes half of what the free search does.
SEARCH = "data-parallel"


def slow():
    """A cluster whose arithmetic is so slow that small models are worth stages."""
    device = Device("toy", 10**9, 1e9, (("f32", 1e8), ("f64", 1e7)))
    link = LinkSpec(1e11, 0.0)
    return Cluster("toy", (NodeGroup(1, 8, device, link, link),))


def run(model, schedule, stages, m, calls):
    """(state drained, states after each call, losses of the calls, what the replay says of all three)."""
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    batches = [make(jax.random.key(100 + n), 4 * m) for n in range(calls)]
    options = {"schedule": schedule, "num_stages": stages, "num_microbatches": m, "search": SEARCH}
    step = autopar.parallelize(step_of(loss, tx), cluster=slow(), **options)
    lies = step.compile(state, batches[0]).plan.input_stages
    homes = jax.tree_util.tree_map_with_path(
        lambda path, _: lies["state['params']" + jax.tree_util.keystr(path)][0], params
    )
    assert len(set(jax.tree.leaves(homes))) > 1
    versions = VersionMap(schedule, stages, m)
    want, losses = replay(loss, tx, state, batches, versions, m, homes)
    current, seen = state, []
    for batch in batches:
        current, metrics = step(current, batch)
        seen.append((current, metrics["loss"]))
    return step, seen, want, np.array(losses).reshape(calls, m), versions, homes


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, want)


def check(model, schedule, stages, m, calls=4):
    step, seen, want, losses, versions, homes = run(model, schedule, stages, m, calls)
    for c, (state, value) in enumerate(seen):
        np.testing.assert_allclose(value, losses[c].mean(), rtol=1e-12)
        for s in range(stages):
            done = [(c + 1) * m - (stages - 1 - s)][0] // versions.update_every
            newest = want[max(done, 0)]["params"]
            jax.tree.map(
                lambda home, a, b, s=s: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12) if home == s else None,
                homes, state.state["params"], newest,
            )  # fmt: skip
    assert_close(step.drain(seen[-1][0]), want[-1])
    assert_close(step.drain(seen[0][0]), want[m // versions.update_every])
    assert {v for c in range(calls * m) for v in [versions.reads(0, c) < c // versions.update_every]} == {False, True}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(("model", "stages", "m"), [("perceptron", 2, 2), ("residual", 3, 4), ("mlp", 4, 4)])
def test_calls_and_drain_are_the_replay_of_the_version_table(x64, model, schedule, stages, m):
    check(model, schedule, stages, m)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(
    ("model", "stages", "m"), [("perceptron", 2, 3), ("perceptron", 3, 3), ("residual", 2, 3), ("attention", 2, 3)]
)
def test_every_schedule_and_model_is_its_replay(x64, model, schedule, stages, m):
    check(model, schedule, stages, m)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt", "wide_resnet"])
@pytest.mark.parametrize("m", [2, 4, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_and_microbatches_of_three_models_are_their_replay(x64, model, stages, m):
    schedules = ["pipedream", "pipedream-vertical", "2bw"][: 3 if m >= stages else 2]
    check(model, schedules[(stages + m) % len(schedules)], stages, m, calls=3)


def test_2bw_is_delayed_with_all_that_passes_read_among_the_versions(x64):
    """Passes of 2bw read a count at their version. `delayed` has one version of what is not named in ``params``."""

    def step(state, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["first"])
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(7), state["n"]), 0.5, (16,))
            return ((jnp.where(kept, hidden, 0.0) @ params["second"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.3 * g, state["params"], grads)
        return {"params": params, "n": state["n"] + 1}, {"loss": value}

    keys = jax.random.split(jax.random.key(0), 6)
    params = {n: jax.random.normal(k, (16, 16)) / 4 for n, k in zip(("first", "second"), keys, strict=False)}
    state, batches = {"params": params, "n": jnp.int32(0)}, [{"x": jax.random.normal(k, (8, 16))} for k in keys[2:]]
    options = {"schedule": "2bw", "num_stages": 2, "num_microbatches": 2, "search": SEARCH}
    pipelined = autopar.parallelize(step, cluster=slow(), **options)
    with_counts = autopar.transforms.delayed(step, params=lambda path: path == "n" or path.startswith("params"))
    drained = []
    for reference in (with_counts, autopar.transforms.delayed(step)):
        run, later = jax.jit(reference), reference.init(state)
        for batch in batches:
            later, _ = run(later, batch)
        drained.append(reference.drain(later)["params"])
    current = state
    for batch in batches:
        current, _ = pipelined(current, batch)
    got = pipelined.drain(current)["params"]
    assert_close(got, drained[0])
    assert float(jnp.abs(got["first"] - drained[1]["first"]).max()) > 1e-6


def decorated(model="perceptron", schedule="pipedream", m=2, **options):
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    options = {"schedule": schedule, "num_stages": 2, "num_microbatches": m, "search": SEARCH, **options}
    step = autopar.parallelize(step_of(loss, tx), cluster=slow(), **options)
    return step, state, [make(jax.random.key(n), 4 * m) for n in range(4)]


@pytest.mark.slow
def test_a_checkpoint_holds_what_is_under_way_and_plans_are_kept(x64, tmp_path):
    step, state, batches = decorated()
    state, _ = step(state, batches[0])
    state, _ = step(state, batches[1])
    step.save(str(tmp_path / "states"), state, wait=True)
    step.plans()[-1].save(tmp_path / "plan.json")
    later, _, _ = decorated(plan=str(tmp_path / "plan.json"))
    again = later.restore(str(tmp_path / "states"), like=state)
    for batch in batches[2:]:
        state, first = step(state, batch)
        again, second = later(again, batch)
        assert first["loss"] == second["loss"]
    jax.tree.map(np.testing.assert_array_equal, step.drain(state), later.drain(again))


def refused(change, match, schedule="pipedream", **arguments):
    """A step of the residual model, changed, is refused."""
    params, loss, tx, make = MODELS["residual"]()
    step, state = change(params, loss, tx)
    options = {"schedule": schedule, "num_stages": 2, "num_microbatches": 2, "search": SEARCH}
    whole = autopar.parallelize(step, cluster=slow(), **options)
    with pytest.raises((autopar.ScheduleError, autopar.InfeasiblePlanError), match=match):
        whole.compile(state, make(jax.random.key(0), 8), *arguments.values())


def clipped(params, loss, tx):
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    return step_of(loss, tx), {"params": params, "opt": tx.init(params)}


def penalized(params, loss, tx):
    def total(params, batch):
        return loss(params, batch) + 1e-3 * jnp.sum(params[-1]["w"] ** 2)

    return step_of(total, tx), {"params": params, "opt": tx.init(params)}


def keyed(params, loss, tx):
    def noisy(params, batch, key):
        return loss(params, batch) * (1 + jax.random.uniform(key))

    def step(state, batch, key):
        value, grads = jax.value_and_grad(noisy)(state["params"], batch, key)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, {"params": params, "opt": tx.init(params)}


def test_what_needs_a_flush_is_refused_with_its_line(x64):
    refused(clipped, "the update of stage")
    refused(penalized, "is part of the loss and takes parameters, but no batch")


def test_an_argument_that_is_neither_batch_nor_state_is_refused(x64):
    refused(keyed, "key is read by stage", key=jax.random.key(3))


def test_few_microbatches_and_one_stage_are_refused(x64):
    params, loss, tx, make = MODELS["perceptron"]()
    state, batch = {"params": params, "opt": tx.init(params)}, make(jax.random.key(0), 8)
    with pytest.raises(autopar.ScheduleError, match="2 microbatches for 4 stages"):
        autopar.parallelize(step_of(loss, tx), schedule="2bw", num_stages=4, num_microbatches=2, cluster=slow()).plan(
            state, batch
        )


@pytest.mark.slow
def test_auto_never_takes_a_schedule_that_changes_values(x64):
    step, state, batches = decorated(schedule="auto")
    assert flushes(step.plan(state, batches[0]).schedule)
