"""Context parallelism that a person names: where tokens and state lie, what is gathered, what it saves."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout
from autopar.search import Manual
from examples import gpt, mlp, moe
from tests.search.problems import problem_of, toy

# Too few heads for the devices of tp and cp, so that attention has to gather keys and values.
TEXT = {"abstract": True, "layers": 1, "hidden": 32, "heads": 2, "vocab": 64, "seq": 96, "batch": 6}
KEYS_BYTES = 6 * 96 * 32 * 4
GRID = Manual(dp=2, cp=2, tp=2)


def text(devices, **options):
    return problem_of(*gpt.build(**{**TEXT, **options}), toy(devices))


def results(plan, *names):
    """Layouts of what operators make, by the operators' ids."""
    return {o.id: Layout.parse(o.results[0]) for o in plan.content.operators if any(name in o.id for name in names)}


@pytest.fixture(scope="module")
def grid():
    """cp lies between dp and tp: axes x of dp, y of cp, z of tp."""
    return GRID(text(8))


def test_tokens_lie_along_an_axis_of_their_own(grid):
    assert grid.stages[0].mesh_shape == {"x": 2, "y": 2, "z": 2}
    layouts = {i.path: i.layout for i in grid.content.inputs if i.role == "batch"}
    assert set(layouts.values()) == {"[x,y]"}
    state = [Layout.parse(i.layout) for i in grid.content.inputs if i.role in ("parameter", "optimizer")]
    assert not any({"x", "y"} & set(k.axes) for k in state)
    assert any("tp=2, cp=2, dp=2" in note for note in grid.content.notes)


def test_products_with_parameters_have_their_tokens_split(grid):
    forward = results(grid, *(f"jvp()/dot_general.{n}" for n in range(7)))
    assert len(forward) == 7  # query, key, value, out, up, down, logits
    assert all("y" in k.dims[1] for k in forward.values())


def test_gradients_of_matrices_are_summed_over_cp(grid):
    gradients = [k for k in results(grid, "transpose(jvp())/dot_general").values() if len(k.dims) == 2]
    assert len(gradients) == 7
    assert all("y" in k.partial for k in gradients)
    assert any(set(k.partial) == {"x", "y"} for k in gradients)


@pytest.mark.parametrize("named", [Manual(cp=4), Manual(cp=4, dp=2), GRID, Manual(cp=8)])
def test_keys_and_values_are_gathered_once_and_their_gradients_scattered(named, grid):
    plan = grid if named is GRID else named(text(named.cp * named.dp))
    axis, own = "y" if named.dp > 1 else "x", KEYS_BYTES // (named.dp * named.tp)
    over_cp = {c.kind: c for c in plan.stages[0].collectives if (c.axis, c.bytes) == (axis, own)}
    assert {kind: c.count for kind, c in over_cp.items()} == {"all-gather": 2, "reduce-scatter": 2}


def test_heads_are_moved_where_that_sends_less():
    """All-to-alls of queries, keys, values and results send less than gathers of keys and values to four devices."""
    plan = Manual(cp=4)(text(4, heads=4))
    scores = {o.id: o.results for o in plan.content.operators if o.id.startswith("jvp(bqhd,bshd->bhqs)/dot")}
    assert set(scores.values()) == {("[.,x,.,.]",)}
    assert not any((c.kind, c.bytes) == ("all-gather", KEYS_BYTES) for c in plan.stages[0].collectives)


@pytest.mark.slow
def test_what_a_device_holds_and_does_falls_with_cp():
    alone, shared = Manual(dp=2)(text(2)), Manual(dp=2, cp=4)(text(8))
    before, after = alone.stages[0].memory, shared.stages[0].memory
    assert before.parameters == after.parameters
    assert before.batch == 4 * after.batch
    others = 2 * (KEYS_BYTES / 2) * 3 / 4  # keys and values of other devices, held for the backward pass
    assert after.activations == pytest.approx(before.activations / 4 + others, rel=0.01)
    assert 3.5 < alone.step_time / shared.step_time < 4


@pytest.mark.slow
def test_zero_splits_over_dp_and_cp():
    problem = text(4)
    plain, zero1, zero3 = (Manual(dp=2, cp=2, zero=z)(problem).stages[0].memory for z in (0, 1, 3))
    assert zero1.optimizer == pytest.approx(plain.optimizer / 4, rel=0.05)
    assert zero1.parameters == pytest.approx(plain.parameters, rel=0.05)
    assert zero3.optimizer == pytest.approx(plain.optimizer / 4, rel=0.05)
    assert zero3.parameters == pytest.approx(plain.parameters / 4, rel=0.05)


@pytest.mark.slow
def test_examples_are_not_shared_by_cp_even_where_that_is_cheaper():
    """With tokens split between few examples the cheapest plan is one of more data parallelism."""
    plan = Manual(dp=2, cp=2)(text(4, batch=8, seq=8))
    made = [k for k in results(plan, "jvp()").values() if len(k.dims) == 3]
    assert made and not any("y" in k.dims[0] for k in made)


@pytest.mark.slow
def test_experts_and_tokens_have_an_axis_each():
    problem = problem_of(*moe.build(abstract=True, gate="gshard"), toy(8))
    plan = Manual(dp=4, ep=2, cp=2)(problem)
    layouts = {i.path: i.layout for i in plan.content.inputs}
    assert plan.stages[0].mesh_shape == {"x": 2, "y": 2, "z": 2}
    assert layouts["batch['tokens']"] == layouts["batch['labels']"] == "[x+y,z]"
    assert layouts["state['params']['layers'][1]['up']"] == "[y,.,.]"


def test_what_cannot_share_tokens_says_what_can():
    with pytest.raises(
        InfeasiblePlanError, match=r"96 tokens an example, which cp=5 .*\n.*\n.*cp=2, 3, 4, 6, 8, 12, 16, 24,"
    ):
        Manual(cp=5)(text(5))
    with pytest.raises(InfeasiblePlanError, match="tp=2 times cp=2 times dp=1 are 4 devices; toy has 8"):
        Manual(cp=2, tp=2)(text(8))
    with pytest.raises(InfeasiblePlanError, match="no tokens that cp=4 devices can share"):
        Manual(cp=4, dp=2)(problem_of(*mlp.build(abstract=True), toy(8)))
    with pytest.raises(InfeasiblePlanError, match=r"a mesh of 4 axes; at most 3.*\n.*\n.*ep=4"):
        Manual(tp=2, cp=2, dp=4, ep=2)(problem_of(*moe.build(abstract=True), toy(16)))
