"""Scopes that users call as autopar calls its own: marks say what an operator is, names do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar import parallelize
from autopar.ir import Graph
from autopar.ir.phases import phase_of
from autopar.ir.verify import GraphError, verify
from autopar.lower.microbatch import microbatched
from autopar.search.intra.stage_loops import loops
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import assert_trees_same, one_device
from tests.microbatch.running import traced

LAYERS, WIDTH, EXAMPLES = 4, 16, 32

#: Names that autopar, or jax, gives to what it makes.
NAMES = ["microbatches", "microbatches/jvp(loop)", "jvp(loop)", "segments", "rematted_computation", "transpose(x)"]
NAMES += ["body", "model/body/layer"]


def step_in(name: str, *, accumulated: bool = False, layers: bool = True) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step with loops over layers and over parts of its batch, in a scope of this name."""

    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope(name):
            if layers:
                h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            else:
                h = x
                for n in range(LAYERS):
                    h = jnp.tanh(h @ w[n])
            return jnp.sum(h**2)

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        if not accumulated:
            value, gradient = jax.value_and_grad(loss)(w, x)
            return w - 0.01 * gradient, value

        def part(total: Any, x: Any) -> tuple[Any, None]:
            value, gradient = jax.value_and_grad(loss)(w, x)
            return (total[0] + value, total[1] + gradient), None

        with jax.named_scope(name):
            (value, gradient), _ = lax.scan(
                part, (jnp.zeros(()), jnp.zeros_like(w)), x.reshape(4, EXAMPLES // 4, WIDTH)
            )
        return w - 0.01 * gradient, value

    key = jax.random.key(0)
    return step, (jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 4, jax.random.normal(key, (EXAMPLES, WIDTH)))


def graph_of(name: str, **options: Any) -> Graph:
    step, args = step_in(name, **options)
    return traced(step, args)[0].graph


def phases(graph: Graph) -> list[tuple[str, str]]:
    return [(op.primitive, phase_of(op)) for op in graph.operators]


@pytest.mark.parametrize("name", NAMES)
def test_scopes_of_users_say_nothing_of_an_operator(name: str) -> None:
    for options in ({"accumulated": True}, {"layers": False}):
        graph, plain = graph_of(name, **options), graph_of("plain", **options)
        assert phases(graph) == phases(plain) and not loops(graph)
        assert not any("segments" in op.marks or "recomputed" in op.marks for op in graph.operators)


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_those_of_other_names(name: str) -> None:
    """One stage, whose work and memory the marks decide: an accumulation loop of the user's is no loop of a stage."""

    def planned(name: str) -> Any:
        step, args = step_in(name, accumulated=True)
        return parallelize(step, cluster=toy(devices=2), num_stages=1, num_microbatches=1).plan(*args)

    plan, plain = planned(name), planned("plain")
    assert plan.stages[0].work_times == plain.stages[0].work_times == ()
    assert (plan.step_time, plan.peak_memory) == (plain.step_time, plain.peak_memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["microbatches", "model/body/layer"])
def test_stages_hold_what_those_of_other_names_hold(name: str) -> None:
    """And run to the same values."""

    def planned(name: str) -> Any:
        step, args = step_in(name, layers=False)
        function = parallelize(step, cluster=toy(), num_stages=2, num_microbatches=4, schedule="1f1b")
        return step, args, function.plan(*args)

    (step, args, plan), (_, _, plain) = planned(name), planned("plain")
    assert [s.activation_bytes for s in plan.stages] == [s.activation_bytes for s in plain.stages]
    assert any(s.activation_bytes for s in plan.stages)
    assert (plan.step_time, plan.peak_memory) == (plain.step_time, plain.peak_memory)
    assert_trees_same(one_device(parallelize(step, plan=plan)(*args)), jax.jit(step)(*args))


def test_a_loop_over_microbatches_is_one_by_its_mark() -> None:
    step, args = step_in("plain")
    graph = microbatched(traced(step, args)[0], 4).graph
    (loop,) = [op for op in graph.operators if "microbatches" in op.marks]
    assert loop.primitive == "scan" and phase_of(loop) == "forward"


@pytest.mark.parametrize("marks", [("unheard of",), ("stage", "microbatches"), ("backward", "forward"), ("segments",)])
def test_the_verifier_checks_marks(marks: tuple[str, ...]) -> None:
    graph = graph_of("plain", layers=False)
    product = next(n for n, op in enumerate(graph.operators) if op.primitive == "dot_general")
    operators = [replace(op, marks=marks) if n == product else op for n, op in enumerate(graph.operators)]
    with pytest.raises(GraphError, match="mark"):
        verify(replace(graph, operators=tuple(operators)))
