"""Plans of several stages next to what their programs would be compiled to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cost import wire_bytes
from autopar.lower.aot import compare_stages, parse_target
from autopar.lower.aot.collectives import counted_collectives
from autopar.lower.aot.messages import CompiledCollective, CompiledMemory, CompiledSummary
from autopar.lower.aot.pipeline_verification import gathered
from autopar.lower.pipeline.build import LoweredPipeline, lower_pipeline
from autopar.lower.pipeline.exported import prepared
from autopar.lower.split_layers import split_layers
from autopar.schedule import Work

TEMPORARIES = 1 << 20


def step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.sum(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


@functools.cache
def pipeline(limit_bytes: int | None = None) -> tuple[autopar.Plan, LoweredPipeline]:
    width, examples = (64, 512) if limit_bytes is None else (512, 1024)
    args = (
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4,
        jax.ShapeDtypeStruct((examples, width), jnp.float32),
    )
    options = {"num_stages": 2, "num_microbatches": 4, "remat": "none", "memory_limit": limit_bytes, "schedule": "1f1b"}
    return lowered_for("cpu:4", args, **options)


def lowered_for(target: str, args: tuple[Any, ...], **options: Any) -> tuple[autopar.Plan, LoweredPipeline]:
    cluster = parse_target(target).cluster()
    plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args)
    pure = PureFunction(step, ParallelOptions(plan=plan))
    traced, plan = pure.plan(pure.resolve(args, {})[0])
    return plan, lower_pipeline(split_layers(traced, plan.content.stack_groups).step, plan)


def as_given(lowered: LoweredPipeline, temporaries: int = 0) -> dict[Work, CompiledSummary]:
    """What a compiler would say that changes nothing."""
    found = {}
    for p in lowered.programs:
        axes = lowered.mesh_axes(p.work.stage)
        counts, _ = counted_collectives(*prepared(p, axes), axes)
        collectives = tuple(
            CompiledCollective(kind, axis, size, n * wire_bytes(kind, size, 2), n, int(n), True, ("f32",), ())
            for (kind, axis, size), n in counts.items()
        )
        memory = CompiledMemory(0, 0, temporaries, 0)
        found[p.work] = CompiledSummary("cpu", collectives, memory, 1, 10.0, 0.5)
    return found


def test_programs_count_as_often_as_they_run() -> None:
    plan, lowered = pipeline()
    done = gathered(lowered, as_given(lowered))
    found = compare_stages(plan, parse_target("cpu:4"), done)
    assert len(found.stages) == 2 and found.num_microbatches == 4
    assert any(s.rows for s in found.stages)
    assert found.lowered_ok and found.collectives_ok, str(found)
    # Forward and backward in four microbatches, and the update.
    assert {s.cycles for s in done.stages} <= {90.0, 100.0}


def test_where_memory_binds_each_pass_gathers_for_itself() -> None:
    """Forward and backward are two programs: neither has what the other gathered."""
    free, _ = pipeline(10**9)
    plan, lowered = pipeline(int(free.peak_memory * 0.97))
    assert any(part.memory_bound for part in plan.content.parts)
    assert any(c.kind == "all-gather" for s in plan.stages for c in s.collectives)
    found = compare_stages(plan, parse_target("cpu:4"), gathered(lowered, as_given(lowered)))
    assert found.lowered_ok, str(found)


@pytest.mark.parametrize(
    ("examples", "widths", "search"),
    [
        (16, (64, 128, 64), autopar.search.Manual(dp=4, pp=2)),
        (16, (8, 16, 8), autopar.search.Manual(dp=4, pp=2)),
        (32, (64, 128, 64, 32), autopar.search.Manual(dp=2, pp=2, tp=2)),
        (16, (64, 128, 64, 128, 64), autopar.search.Manual(dp=2, pp=4)),
        (256, (128, 64, 64, 64, 32, 512, 512), autopar.search.Manual(dp=4, pp=2, zero=3)),
        (16, (64, 128, 32, 32, 512), "alpa"),
    ],
)
def test_gathers_of_stages_are_those_of_their_programs(examples: int, widths: tuple[int, ...], search: Any) -> None:
    """What arrives with every microbatch is placed by who sends it; forward and backward each gather for themselves."""
    shapes = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in itertools.pairwise(widths)]
    args = (shapes, jax.ShapeDtypeStruct((examples, widths[0]), jnp.float32))
    stages = getattr(search, "pp", 2)
    plan, lowered = lowered_for("cpu:8", args, search=search, num_microbatches=2, num_stages=stages)
    compared = compare_stages(plan, parse_target("cpu:8"), gathered(lowered, as_given(lowered)))
    assert compared.lowered_ok, str(compared)


def test_a_collective_too_many_is_found_on_its_stage() -> None:
    plan, lowered = pipeline()
    compiled = as_given(lowered)
    more = CompiledCollective("all-to-all", "x", 4096, 1024.0, 1.0, 1, True, ("f32",), ())
    first = Work("forward", 0)
    was = compiled[first]
    compiled[first] = CompiledSummary("cpu", (*was.collectives, more), was.memory, 1, 10.0, 0.5)
    found = compare_stages(plan, parse_target("cpu:4"), gathered(lowered, compiled))
    assert [s.collectives_ok for s in found.stages] == [False, True]
    (row,) = (r for r in found.stages[0].rows if r.bytes == 4096 and r.kind == "all-to-all")
    assert row.compiled == 4  # once a microbatch
    assert not found.ok and "all-to-all" in str(found) and "<table>" in found._repr_html_()
    assert found.to_dict()["stages"][0]["collectives_ok"] is False


def test_memory_is_what_lies_there_and_the_temporaries_of_the_program_that_runs() -> None:
    plan, lowered = pipeline()
    without = gathered(lowered, as_given(lowered)).memory
    found = gathered(lowered, as_given(lowered, TEMPORARIES)).memory
    for a, b in zip(without, found, strict=True):
        assert a.temporaries == 0 and a.live_bytes >= 2 * 64 * 64 * 4 // 2
        assert b.temporaries == TEMPORARIES and b.total <= a.total + TEMPORARIES
    assert [m.stages for m in found] == [(0,), (1,)]
    assert plan.num_stages == 2
