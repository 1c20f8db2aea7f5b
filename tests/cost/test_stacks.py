"""What a stack does beyond the arithmetic, in the plans of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Cluster
from autopar.cost import CostModel, Matrices
from autopar.cost.constants import load_constants
from autopar.search.clock import Clock
from autopar.search.intra import build
from autopar.search.restrict import restricted_plan, solve_restricted
from autopar.solver import solve
from benchmarks.published.bill import bill_of
from tests.ir.test_attention import attend
from tests.search.problems import f32, problem_of

STACKS = sorted(load_constants().stacks)


def card(stack):
    return Cluster.load("dgx-a100", stack=stack).part(0, 1)


def stated_on(fn, *args, stack="xla"):
    problem = problem_of(fn, args, card(stack))
    (mesh,) = problem.cluster.logical_meshes((1,))
    stated = build(problem, mesh)
    return problem, stated, solve(stated.problem).choice


def bill(fn, *args, stack="xla"):
    return bill_of(*stated_on(fn, *args, stack=stack))


def plan(fn, *args, stack):
    problem = problem_of(fn, args, card(stack))
    clock, (mesh,) = Clock(), problem.cluster.logical_meshes((1,))
    return restricted_plan(
        problem, solve_restricted(problem, mesh, lambda _, layouts: [True] * len(layouts), clock), "one", clock
    )


def adam(w, m, v, x):
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def clipped_adam(w, m, v, x):
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    norm = jnp.sqrt(jnp.sum(g * g))
    g = jnp.where(norm > 1.0, g / norm, g)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.mark.parametrize(("step", "each"), [(adam, 28), (clipped_adam, 32)])
def test_an_update_reads_and_writes_each_value_once(step, each):
    """Gradient, parameter and two moments are read, three written, 4 bytes each; the norm reads gradients once more."""
    n = 1024 * 1024
    found = bill(step, *[f32(1024, 1024)] * 3, f32(16, 1024))
    moved = sum(k.bytes for k in found.kernels if k.phase == "update" and k.shapes[-1] in ((1024, 1024), ()))
    assert moved == pytest.approx(each * n, rel=0.001)


def test_a_function_without_gradients_has_no_update():
    """What reads a value twice far apart reads it twice."""
    found = bill(lambda x: (x * 2.0, jnp.sum(x), x + 3.0), f32(1024, 1024))
    assert sum(k.bytes for k in found.kernels) == pytest.approx(5 * 4 * 1024**2, rel=0.001)


def loss(q, k, v):
    return jnp.sum(attend(q, k, v, True) ** 2)


HEADS = [f32(4, 1024, 16, 64)] * 3


def test_fused_attention_never_writes_scores():
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    one_scores = 4 * 4 * 16 * 1024**2
    kept, fused = (plan(gradients, *HEADS, stack=s) for s in ("xla", "megatron-core"))
    assert kept.peak_memory > one_scores > fused.peak_memory
    assert kept.step_time > 2 * fused.step_time


def test_fused_attention_computes_half_under_a_causal_mask_and_scores_once_more():
    cost = CostModel(card("megatron-core"))
    apart = CostModel(card("xla"))
    scores = Matrices(1024, 2048, 2048, 4096)  # so deep that only computing counts
    whole_s = cost.product_s(scores, "bf16", "whole")
    assert whole_s == pytest.approx(float(apart.product_s(scores, "bf16", "whole")), rel=1e-3)
    assert cost.product_s(scores, "bf16", "causal") == pytest.approx(whole_s / 2, rel=1e-3)
    assert cost.product_s(scores, "bf16", "whole", backward=True) == pytest.approx(whole_s * 5 / 4, rel=1e-3)


def small(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x


def test_the_host_starts_kernels_of_eager_programs_one_by_one():
    args = (f32(64, 64), f32(64, 64))
    eager, compiled = (plan(small, *args, stack=s) for s in ("eager", "xla"))
    start_s = load_constants().stack("eager").start_s
    kernels = sum(not k.fused for k in bill(small, *args, stack="eager").kernels)
    assert kernels == 16
    assert eager.step_time == pytest.approx(kernels * start_s, rel=0.01)
    assert compiled.step_time < eager.step_time / 5
    assert any("for the host" in note for note in eager.content.notes)
    assert not any("for the host" in note for note in compiled.content.notes)


def test_the_host_is_ahead_of_long_kernels():
    args = (f32(8192, 8192), f32(8192, 8192))
    eager, compiled = (plan(small, *args, stack=s) for s in ("eager", "xla"))
    assert eager.step_time == pytest.approx(compiled.step_time, rel=0.01)


@pytest.mark.parametrize("stack", STACKS)
def test_no_bound_is_above_a_step(stack):
    found = plan(small, f32(256, 256), f32(256, 256), stack=stack)
    assert 0 < found.content.search.lower_bound <= found.step_time


def test_messages_go_together_up_to_a_limit():
    assert CostModel.combined([4.0, 4.0, 4.0, 20.0, 1.0], 10.0) == [8.0, 4.0, 20.0, 1.0]
    assert CostModel.combined([4.0, 4.0], 0.0) == [4.0, 4.0]
    assert CostModel.combined([4.0, 4.0], 1e12) == [8.0]
    assert CostModel.combined([], 1.0) == []


def test_prices_of_several_kernels_are_those_of_each():
    cost = CostModel(card("xla"))
    sizes = [(1.0, 128.0, 512.0, 64.0), (4.0, 100.0, 33.0, 70.0), (1.0, 0.0, 16.0, 16.0)]
    together = cost.product_s(Matrices(*np.array(sizes).T), "bf16")
    assert list(together) == [float(cost.product_s(Matrices(*s), "bf16")) for s in sizes]
