"""Stages of pipelines pad dims that their devices do not divide, where that is faster; others see nothing of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Plan, parallelize
from autopar.ir.phases import is_stage_loop
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.plan import StepForm
from autopar.sharding.padding import candidates
from autopar.stages.layers import forward_operators, members_of
from tests.end_to_end.test_segments_in_stages import assert_lists_give_the_same_bits, carried_out
from tests.microbatch.running import traced
from tests.runtime_ray.pipelines import furthest, numbers, thread_cluster
from tests.search.problems import toy


def model(vocab: int = 15, width: int = 8, rows: int = 8, layers: int = 4) -> tuple[Any, Any]:
    """A step of gradient descent on classes of which two devices divide no more than one."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["embed"][batch[0]]
        for w in p["layers"]:
            x = x + jnp.tanh(x @ w)
        scores = jax.nn.log_softmax(x @ p["out"])
        return -jnp.take_along_axis(scores, batch[1][:, None], -1).mean()

    def step(p: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), value

    def drawn(number: int, *shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(jax.random.key(number), shape, jnp.float64)

    labels = jax.random.randint(jax.random.key(9), (2, rows), 0, vocab)
    p = {"embed": drawn(0, vocab, width), "out": drawn(1, width, vocab)}
    p["layers"] = [drawn(2 + n, width, width) for n in range(layers)]
    return step, (p, (labels[0], labels[1]))


def planned(step: Any, args: Any, **options: Any) -> Plan:
    """A plan of two stages of two devices each, whose microbatches of three rows two devices do not divide."""
    asked = {"num_stages": 2, "num_microbatches": 3, "remat": "none", "donate_argnums": 0, **options}
    return parallelize(step, cluster=toy(4, flops=1e11, bandwidth=1e12), **asked).plan(*args)


@pytest.mark.parametrize(("count", "level"), [(2, "none"), (1, "none"), (2, "full")])
def test_a_stage_in_padding_takes_and_gives_what_it_did(x64: None, count: int, level: str) -> None:
    """Its loop alone has padding, also where the backward pass computes it again."""
    step, args = model()
    source = TracedStages(step_of(traced(step, args)[0]))
    graph = source.step.graph
    forward = [op.id for op in forward_operators(graph, source.microbatches(count))]
    members = members_of(forward, (forward[len(forward) // 2],))
    for stage in (0, 1):
        plain = source.stage_graph(members, stage, StepForm(count, level))
        dims = tuple(d for c in candidates(plain.graph, 2, 0.3) for d in c.dims(plain.graph))
        assert dims
        padded = source.stage_graph(members, stage, StepForm(count, level, padded=dims))
        assert padded.graph.inputs == plain.graph.inputs
        for a, b in zip(padded.graph.outputs, plain.graph.outputs, strict=True):
            assert (a.path, a.type, a.updates) == (b.path, b.type, b.updates)
        shapes = [
            {v.type.shape for op in loop.region("body").operators for v in op.results}
            for g in (plain.graph, padded.graph)
            for loop in filter(is_stage_loop, g.operators)
        ]
        assert any(16 in shape for shape in shapes[1]) and not any(16 in shape for shape in shapes[0])


def test_stages_pad_where_it_is_faster(x64: None) -> None:
    step, args = model(vocab=255, rows=9)
    plan, plain = planned(step, args), planned(step, args, padding=False)
    assert any(s.form.padded for s in plan.stages) and not any(s.form.padded for s in plain.stages)
    assert plan.step_time < plain.step_time
    assert "padded to 256" in str(plan.content.notes)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert carried_out(step, args, loaded)[1] < 1e-10


@pytest.mark.slow
def test_lists_of_many_hosts_give_the_same_bits(x64: None) -> None:
    step, args = model(vocab=255, rows=9)
    program, _ = carried_out(step, args, planned(step, args))
    assert_lists_give_the_same_bits(step, args, program, 4)


@pytest.mark.slow
def test_workers_of_ray_pad(x64: None) -> None:
    """Threads of this process, to which stages go as texts."""
    pytest.importorskip("flatbuffers")
    step, args = model(vocab=255, rows=9)
    with thread_cluster(2, 2, like=toy(2, flops=1e11, bandwidth=1e12).groups[0]) as cluster:
        options = {"num_stages": 2, "num_microbatches": 3, "remat": "none", "donate_argnums": 0}
        compiled = parallelize(step, cluster=cluster, **options).compile(*args)
        assert any(s.form.padded for s in compiled.plan.stages)
        results = [numbers(x) for x in jax.tree.leaves(compiled(*jax.tree.map(np.array, args)))]
    assert furthest(results, [numbers(x) for x in jax.tree.leaves(jax.jit(step)(*args))]) < 1e-10
