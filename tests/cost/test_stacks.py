"""What a stack does beyond the arithmetic, in the plans of one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from autopar import Cluster, Plan
from autopar.cluster import AdjustedStack
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
    program = load_constants().stack("megatron-core")
    assert kept.step_time > 2 * (fused.step_time - program.step_s - program.microbatch_s)


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
    program = load_constants().stack("eager")
    start_s, besides_s = program.start_s, program.step_s + program.microbatch_s
    kernels = sum(not k.fused for k in bill(small, *args, stack="eager").kernels)
    assert kernels == 16
    assert eager.step_time - besides_s == pytest.approx(kernels * start_s, rel=0.01)
    assert compiled.step_time < (eager.step_time - besides_s) / 5
    assert any("for the host" in note for note in eager.content.notes)
    assert not any("for the host" in note for note in compiled.content.notes)


def test_a_plan_has_the_constants_of_an_adjusted_stack():
    """Twice the seconds of a start are twice the step that starts decide, and stay with a plan's text."""
    args = (f32(64, 64), f32(64, 64))
    program = load_constants().stack("eager")
    slower = AdjustedStack("eager", (("stacks.eager.start_s", 2 * program.start_s),))
    plans = [plan(small, *args, stack=s) for s in ("eager", AdjustedStack("eager", ()), slower)]
    known_s, same_s, slower_s = (p.step_time - program.step_s - program.microbatch_s for p in plans)
    assert same_s == known_s
    assert slower_s == pytest.approx(2 * known_s, rel=0.01)
    assert Cluster.from_json(Plan.from_json(plans[2].to_json()).content.cluster).stack == slower


def test_the_host_is_ahead_of_long_kernels():
    args = (f32(8192, 8192), f32(8192, 8192))
    eager, compiled = (plan(small, *args, stack=s) for s in ("eager", "xla"))
    program = load_constants().stack("eager")
    besides_s = program.step_s + program.microbatch_s
    assert eager.step_time - besides_s == pytest.approx(compiled.step_time, rel=0.01)


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


WEIGHTS = {"up": f32(4, 512, 2048), "down": f32(4, 2048, 512)}


def recomputed(state, x):
    """Layers whose weights are converted to half width, recomputed whole."""

    @jax.checkpoint
    def layer(x, w):
        inner = jnp.tanh(x @ w["up"].astype(jnp.bfloat16))
        return x + inner @ w["down"].astype(jnp.bfloat16), None

    def loss(state):
        return jnp.sum(jax.lax.scan(layer, x.astype(jnp.bfloat16), state["params"])[0].astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))


def planned_under(**changed):
    """The step of `recomputed` under a program that does what was traced, but for what is changed."""
    constants = load_constants()
    program = msgspec.structs.replace(constants.stack("plain"), **changed)
    constants = msgspec.structs.replace(constants, stacks={**constants.stacks, "plain": program})
    problem = problem_of(recomputed, ({"params": WEIGHTS}, f32(4096, 512)), card("plain"))
    inputs = tuple(replace(i, role="parameter" if "params" in i.name else "batch") for i in problem.graph.inputs)
    cost = CostModel(problem.cluster, constants=constants)
    problem = replace(problem, graph=replace(problem.graph, inputs=inputs), cost_model=cost)
    clock, (mesh,) = Clock(), problem.cluster.logical_meshes((1,))
    return restricted_plan(
        problem, solve_restricted(problem, mesh, lambda _, layouts: [True] * len(layouts), clock), "one", clock
    ).step_time


def test_a_program_that_runs_layers_again_whole_computes_their_last_product_twice():
    cost = CostModel(card("plain"))
    again_s = planned_under(runs_whole_again=True) - planned_under()
    product_s = 4 * float(cost.product_s(Matrices(1, 4096, 512, 2048), "bf16"))
    assert product_s <= again_s < 2 * product_s


def test_narrow_parameters_are_not_converted_again_for_the_backward_pass():
    """Once forward as traced; not where layers run again, nor gradients: 6 bytes an element and a start each time."""
    elements, cost = 2 * 4 * 512 * 2048, CostModel(card("plain"))
    saved_s = planned_under() - planned_under(keeps_narrow_parameters=True)
    once_s = 8 * cost.operator_s(0.0, 6.0 * elements / 8, "f32")
    assert saved_s == pytest.approx(2 * once_s, rel=0.01)


def test_adding_gradients_up_moves_as_many_bytes_an_element_as_the_program_says():
    elements, cost = 2 * 4 * 512 * 2048, CostModel(card("plain"))
    more_s = planned_under(accumulate_bytes=6.0) - planned_under()
    assert more_s == pytest.approx(cost.operator_s(0.0, 6.0 * elements, "f32", starts=False), rel=1e-6)


def test_a_step_and_a_microbatch_take_what_the_program_says():
    assert planned_under(step_s=0.25, microbatch_s=0.03) - planned_under() == pytest.approx(0.28)


@pytest.mark.parametrize(("stack", "share"), [("megatron-core", 529 / 989), ("fsdp", 333 / 989)])
def test_attention_of_a_measured_kernel_takes_as_long_as_it_was_measured(stack, share):
    """8,192 tokens under a causal mask on an H100: half of the scores."""
    cost = CostModel(Cluster.load("dgx-h100", stack=stack).part(0, 1))
    scores = Matrices(16, 8192, 8192, 128)
    expected_s = scores.flops / 2 / (989e12 * share)
    assert cost.product_s(scores, "bf16", "causal") == pytest.approx(expected_s, rel=1e-2)
    apart = CostModel(card("xla"))
    assert load_constants().attention_of(cost.stack.attention_kernel, apart.cluster.device_types[0].kind) is None
