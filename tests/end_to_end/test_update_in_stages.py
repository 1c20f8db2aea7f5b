"""Stages with one microbatch a step update their layers in the backward loop where memory is short."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from autopar import Plan, parallelize
from autopar.errors import InfeasiblePlanError
from autopar.ir.layer_loops import replaced_in_place
from autopar.ir.phases import is_stage_loop
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.split_layers import split_layers
from autopar.plan import StepForm
from autopar.stages.layers import forward_operators, members_of
from tests.end_to_end.test_segments_in_stages import assert_lists_give_the_same_bits, carried_out, planned
from tests.lower.test_backward_update import model
from tests.microbatch.running import traced
from tests.runtime_ray.pipelines import furthest, numbers, thread_cluster

ONE = {"num_microbatches": 1, "remat": "none"}


def adam(layers: int = 12, width: int = 8) -> tuple[Any, Any]:
    """A step whose state and gradients take more than what its layers leave."""
    return model(optax.adam(1e-2, eps=1e-4), layers=layers, width=width, widths=(4 * width,), deviation=0.05)


def cut(step: Any, args: Any, count: int) -> tuple[TracedStages, Any]:
    """A step that can be cut, and two stages of its forward pass: half of the layers each."""
    split = split_layers(traced(step, args)[0], 2).step
    source = TracedStages(split)
    forward = [op.id for op in forward_operators(split.graph, source.microbatches(count))]
    loops = [id for id in forward if split.graph.by_id[id].primitive == "scan"]
    return source, members_of(forward, (loops[0],))


def test_the_loop_of_a_stage_makes_the_new_state_where_the_old_lies(x64: None) -> None:
    source, members = cut(*adam(), 1)
    for stage in (0, 1):
        assert source.updates_in_backward(1, members, stage)
        plain, updated = (source.stage_graph(members, stage, StepForm(backward_update=u)) for u in (False, True))
        assert updated.graph.inputs == plain.graph.inputs
        ends = [[(o.path, o.type, o.updates) for o in s.graph.outputs] for s in (plain, updated)]
        assert ends[0] == ends[1]
        (loop,) = filter(is_stage_loop, updated.graph.operators)
        body = loop.region("body")
        replaced = {o.updates for o in body.outputs if o.updates is not None}
        stacks = [i for i in updated.graph.inputs if i.role in ("parameter", "optimizer") and i.type.shape[:1] == (6,)]
        assert len(replaced) == len(stacks) > 6
        in_place = [replaced_in_place(body, op) for op in body.operators]
        assert sum(map(len, in_place)) == len(stacks)


def test_no_update_waits_for_other_microbatches_or_stages(x64: None) -> None:
    source, members = cut(*adam(), 2)
    assert not source.updates_in_backward(2, members, 0)
    with pytest.raises(InfeasiblePlanError, match="updated in the backward loop"):
        source.stage_graph(members, 0, StepForm(2, backward_update=True))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    source, members = cut(*model(clipped, layers=12), 1)
    assert not any(source.updates_in_backward(1, members, stage) for stage in (0, 1))


def least(step: Any, args: Any, **more: Any) -> Plan:
    """The plan of two stages without a limit."""
    return planned(step, args, 2, **{**ONE, **more})


def test_stages_update_in_the_loop_where_memory_is_short(x64: None) -> None:
    """A limit under which gradients do not lie next to the state: the same values, and the plan says so."""
    step, args = adam()
    limit = 0.55 * least(step, args).peak_memory
    plan = planned(step, args, 2, limit, **ONE)
    assert plan.peak_memory <= limit
    assert all(s.form.backward_update for s in plan.stages)
    assert "layers updated inside of the backward loop" in str(plan)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    program, apart = carried_out(step, args, loaded)
    assert apart < 1e-10
    assert program.footprint_bytes == pytest.approx(plan.peak_memory, rel=0.1)


@pytest.mark.slow
def test_lists_of_many_hosts_give_the_same_bits(x64: None) -> None:
    step, args = adam()
    plan = planned(step, args, 2, 0.55 * least(step, args).peak_memory, **ONE)
    program, _ = carried_out(step, args, plan)
    assert_lists_give_the_same_bits(step, args, program, 2)


@pytest.mark.slow
def test_workers_of_ray_update_in_the_loop(x64: None) -> None:
    """Threads of this process, to which stages go as texts."""
    pytest.importorskip("flatbuffers")
    step, args = adam()
    limit = int(0.55 * least(step, args).peak_memory)
    with thread_cluster(2, 1) as cluster:
        options = {**ONE, "num_stages": 2, "memory_limit": limit, "donate_argnums": 0}
        compiled = parallelize(step, cluster=cluster, **options).compile(*args)
        assert all(s.form.backward_update for s in compiled.plan.stages)
        results = [numbers(x) for x in jax.tree.leaves(compiled(*jax.tree.map(np.array, args)))]
    assert furthest(results, [numbers(x) for x in jax.tree.leaves(jax.jit(step)(*args))]) < 1e-10
