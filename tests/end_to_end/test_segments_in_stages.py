"""Stages of pipelines run their layers in segments where memory is short: plans that no level of recomputation has."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import Plan, parallelize
from autopar.errors import InfeasiblePlanError
from autopar.ir.layer_loops import is_segmented
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.split_layers import split_layers
from autopar.plan import StepForm
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.pipeline import load_pipeline
from autopar.stages.layers import forward_operators, members_of
from tests.end_to_end.compare import difference
from tests.end_to_end.deep import MODELS
from tests.end_to_end.test_checkpoints_on_host import cluster as with_hosts
from tests.microbatch.running import traced
from tests.runtime_ray.pipelines import furthest, numbers, thread_cluster
from tests.search.problems import toy

LEVELS = ("none", "selective", "full")
TWO = {"num_microbatches": 2}


def chain(layers: int = 10, width: int = 4, examples: int = 64) -> tuple[Any, Any]:
    """A step of gradient descent whose layers leave eight times what enters them."""

    def loss(p: Any, batch: Any) -> jax.Array:
        def layer(y: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return y + jnp.tanh(jnp.tanh(y @ w["up"])) @ w["down"], None

        return jnp.mean((lax.scan(layer, batch[0], p)[0] - batch[1]) ** 2)

    def step(p: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), value

    def drawn(number: int, *shape: int) -> jax.Array:
        return 0.2 * jax.random.normal(jax.random.key(number), shape, jnp.float64)

    p = {"up": drawn(0, layers, width, 4 * width), "down": drawn(1, layers, 4 * width, width)}
    return step, (p, (drawn(2, examples, width), drawn(3, examples, width)))


def planned(step: Any, args: Any, stages: int, limit: float | None = None, **options: Any) -> Plan:
    """A plan of stages of one device each."""
    memory = {} if limit is None else {"memory_limit": int(limit)}
    cluster = toy(stages, flops=1e12, bandwidth=1e11)
    asked = {"num_stages": stages, "num_microbatches": 2 * stages, "donate_argnums": 0, **memory, **options}
    return parallelize(step, cluster=cluster, **asked).plan(*args)


def carried_out(step: Any, args: Any, plan: Plan) -> tuple[LoadedProgram, float]:
    """The program of a plan on the first devices, and how far its results are from those of ``step`` on one."""
    call = parallelize(step, cluster=toy(1)).trace(*args)
    found, leaves = call.pure.traced(call.signature), jax.tree.leaves(args)
    split, donated = split_layers(found, plan.content.stack_groups), range(len(jax.tree.leaves(args[0])))
    lowered = lower_pipeline(split.step, plan, {n for i in donated for n in split.names(i)})
    devices = jax.devices()[: sum(len(s.devices) for s in plan.stages)]
    program = load_pipeline(found, split, lowered, devices, donated)
    copies = [np.array(leaf) for leaf in leaves]
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    results = program.run(program.place_all(copies), copies)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(results, wanted, strict=True)]
    return program, max(difference(a, b) for a, b in pairs)


@pytest.mark.parametrize(("stages", "limit"), [(2, 100_000), (4, 40_000)])
def test_stages_in_segments_have_the_values_of_the_step(x64: None, stages: int, limit: int) -> None:
    """Under three quarters of what recomputation needs; the plan says so, is loaded with its forms, and fits."""
    step, args = chain(layers=5 * stages)
    plan = planned(step, args, stages, limit, num_microbatches=stages)
    assert [s.form.segment_layers for s in plan.stages] == [1] * stages and plan.peak_memory <= limit
    assert "each layer computed again" in str(plan) and "segments of 1 layer" in str(plan)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    program, apart = carried_out(step, args, loaded)
    assert apart < 1e-14 and program.footprint_bytes <= limit


def assert_lists_give_the_same_bits(step: Any, args: Any, program: Any, devices: int) -> None:
    """Lists of many hosts give what a pipeline of this process gives."""
    call, leaves = parallelize(step, cluster=toy(1)).trace(*args), jax.tree.leaves(args)
    found, split = call.pure.traced(call.signature), program.split_step
    world = load_pipeline(found, split, program.lowered, jax.devices()[:devices], program.donated)
    results = [p.run(p.place_all(c), c) for p in (program, world) for c in [[np.array(leaf) for leaf in leaves]]]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_lists_of_many_hosts_give_the_same_bits(x64: None) -> None:
    step, args = chain()
    plan = planned(step, args, 2, 100_000, **TWO)
    program, _ = carried_out(step, args, plan)
    assert_lists_give_the_same_bits(step, args, program, 2)


@pytest.mark.slow
def test_workers_of_ray_run_segments(x64: None) -> None:
    """Threads of this process, to which stages go as texts."""
    pytest.importorskip("flatbuffers")
    step, args = chain()
    with thread_cluster(2, 1) as cluster:
        options = {"num_microbatches": 2, "memory_limit": 100_000, "donate_argnums": 0}
        compiled = parallelize(step, cluster=cluster, **options).compile(*args)
        assert [s.form.segment_layers for s in compiled.plan.stages] == [1, 1]
        results = [numbers(x) for x in jax.tree.leaves(compiled(*jax.tree.map(np.array, args)))]
    assert furthest(results, [numbers(x) for x in jax.tree.leaves(jax.jit(step)(*args))]) < 1e-11


def test_what_enters_segments_of_microbatches_in_flight_waits_on_hosts(x64: None) -> None:
    """Under what segments need on devices, with more microbatches in flight than move at a time."""
    step, args = chain()
    asked = {"num_stages": 2, "num_microbatches": 8, "schedule": "gpipe", "donate_argnums": 0, "offload": "auto"}

    def within(limit: float, **options: Any) -> Plan:
        call = parallelize(step, cluster=with_hosts(2, 1e9), memory_limit=int(limit), **{**asked, **options})
        return call.plan(*args)

    with pytest.raises(InfeasiblePlanError) as error:
        within(1000, offload="none")
    assert error.value.least_bytes is not None
    share = 0.9 if "one_minus_square" not in str(jax.make_jaxpr(step)(*args)) else 0.95  # jax 0.12 keeps less
    plan = within(share * error.value.least_bytes)
    assert all(s.form.segment_layers and s.form.activations_offloaded for s in plan.stages)
    assert plan.peak_memory <= share * error.value.least_bytes
    assert carried_out(step, args, Plan.from_json(plan.to_json()))[1] < 1e-14


@pytest.mark.slow
def test_no_level_of_recomputation_fits_the_limit(x64: None) -> None:
    step, args = chain()
    least = min(planned(step, args, 2, remat=level, **TWO).peak_memory for level in LEVELS)
    assert least > 1.3 * 100_000
    for level in LEVELS:
        with pytest.raises(InfeasiblePlanError):
            planned(step, args, 2, 100_000, remat=level, **TWO)


def test_loops_of_a_stage_are_in_segments_inside_of_its_microbatches(x64: None) -> None:
    step, args = chain(layers=12)
    split = split_layers(traced(step, args)[0], 2).step
    source = TracedStages(split)
    forward = [op.id for op in forward_operators(split.graph, source.microbatches(2))]
    first = next(id for id in forward if split.graph.by_id[id].primitive == "scan")
    members = members_of(forward, (first,))
    plain, segmented = (source.stage_graph(members, 0, StepForm(2, segment_layers=k)) for k in (0, 3))
    assert [i.name for i in plain.graph.inputs] == [i.name for i in segmented.graph.inputs]
    assert [(o.path, o.type, o.updates) for o in plain.graph.outputs] == [
        (o.path, o.type, o.updates) for o in segmented.graph.outputs
    ]
    (loop,) = filter(is_stage_loop, segmented.graph.operators)
    inside = [op for op in loop.region("body").operators if is_segmented(op)]
    assert [Scan.of(op).length for op in inside] == [2, 2]
    assert not any(
        is_segmented(op) for op in next(filter(is_stage_loop, plain.graph.operators)).region("body").operators
    )
    origins = segmented.program.bounds[loop.id].regions["body"].origins
    assert {origins[op.id] for op in inside} <= {op.id for op in split.graph.operators}


def least_of_segments(step: Any, args: Any, stages: int, least: int) -> tuple[int, int]:
    """Bytes that a plan with segments needs, in all stages where that is found, and a limit under which it is."""
    found = (0, 0)
    for share in (0.95, 0.8, 0.65, 0.5):
        try:
            plan = planned(step, args, stages, share * least)
        except InfeasiblePlanError:
            break
        found = (plan.peak_memory, int(share * least))
        if all(s.form.segment_layers for s in plan.stages):
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_that_did_not_fit(x64: None, name: str, stages: int) -> None:
    """Under a limit drawn between what segments need and the least of all levels of recomputation."""
    layers = 11 * stages * (2 if name in ("encoder-decoder", "unet") else 1)
    step, args = MODELS[name](layers)
    least = min(planned(step, args, stages, remat=level).peak_memory for level in LEVELS)
    needed, most = least_of_segments(step, args, stages, least)
    limit = needed + random.Random(f"{name} {stages}").random() * (most - needed)
    plan = planned(step, args, stages, limit)
    assert plan.peak_memory <= limit < least and any(s.form.segment_layers for s in plan.stages)
    program, apart = carried_out(step, args, plan)
    assert apart < 1e-10
    # Measured: see the table of docs/memory.md.
    assert program.footprint_bytes == pytest.approx(plan.peak_memory, rel=0.1)


@pytest.mark.slow
def test_what_runs_again_of_the_batch_and_the_state_alone_waits_for_the_backward_pass(x64: None) -> None:
    """The first layers of the first stage take nothing that the forward pass left: one array of the state waits."""
    step, args = MODELS["unet"](44)
    plan = planned(step, args, 2, remat="full")
    program, apart = carried_out(step, args, plan)
    assert apart < 1e-10
    assert program.footprint_bytes == pytest.approx(plan.peak_memory, rel=0.1)
