"""Independent branches of graphs: what is found, and that it can run in that order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost import total_flops
from autopar.ir.independent import grouped, independent_branches
from tests.end_to_end.towers import drawn
from tests.search.problems import f32, graph_of


def branches_of(fn, *args, least_share=0.05):
    graph = graph_of(fn, *args)
    weights = [total_flops(graph, op) for op in graph.operators]
    return graph, independent_branches(graph.operators, weights, least_share)


def products(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


W = f32(8, 8)


def test_two_towers():
    def fn(a, b, x, y):
        return jnp.sum(products(x, a) * products(y, b))

    _, found = branches_of(fn, [W] * 3, [W] * 2, f32(4, 8), f32(4, 8))
    assert [sum("dot_general" in id for id in ids) for ids in found.branches] == [3, 2]
    assert found.trunk == ()
    assert found.weights[0] > found.weights[1]


def test_what_both_need_is_the_trunk():
    def fn(t, a, b, x):
        x = products(x, t)
        return jnp.sum(products(x, a) + products(x, b))

    _, found = branches_of(fn, [W] * 2, [W] * 3, [W] * 3, f32(4, 8))
    assert sum("dot_general" in id for id in found.trunk) == 2
    assert len(found.branches) == 2


@pytest.mark.parametrize("join", ["sum", "concatenate"])
def test_five_members_of_an_ensemble(join):
    def fn(ws, x):
        ends = [products(x, w) for w in ws]
        return jnp.sum(sum(ends) if join == "sum" else jnp.concatenate(ends))

    _, found = branches_of(fn, [[W] * 2] * 5, f32(4, 8))
    assert len(found.branches) == 5
    assert sum("dot_general" in id for ids in found.branches for id in ids) == 10


def test_losses_that_nothing_joins():
    def fn(a, b, x):
        return products(x, a), products(x, b)

    _, found = branches_of(fn, [W] * 2, [W] * 2, f32(4, 8))
    assert len(found.branches) == 2
    assert found.merge == ()


def test_a_chain_and_blocks_with_shortcuts_have_none():
    def fn(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x)

    assert branches_of(fn, [W] * 6, f32(4, 8))[1] is None
    assert branches_of(lambda x: x, f32(4))[1] is None


def test_projections_of_one_layer_of_many_save_too_little():
    def fn(ws, x):
        for q, k, v in ws:
            x = jax.nn.softmax((x @ q) @ (x @ k).T) @ (x @ v)
        return jnp.sum(x)

    assert branches_of(fn, [(W, W, W)] * 12, f32(8, 8))[1] is None


def test_what_joins_branches_of_one_group_belongs_to_it():
    def fn(a, b, c, x):
        return jnp.sum(products(x, a) * products(x, b) - products(x, c))

    graph, found = branches_of(fn, [W] * 5, [W] * 4, [W] * 3, f32(8, 8))
    assert [sum("dot_general" in id for id in ids) for ids in found.branches] == [5, 4, 3]
    assert {"mul.0", "sub.0", "reduce_sum.0"} == set(found.merge)
    trunk, groups, merge = grouped(graph.operators, found, [[0, 1], [2]])
    assert (trunk, set(merge)) == ((), {"sub.0", "reduce_sum.0"})
    assert "mul.0" in groups[0]
    _, groups, merge = grouped(graph.operators, found, [[0, 2], [1]])
    assert set(merge) == set(found.merge)


def assert_ordered(graph, at, last):
    """Nothing needs another branch, or what joins them; the trunk needs nothing."""
    assert sorted(at) == sorted(op.id for op in graph.operators)
    for op in graph.operators:
        for n in op.reads:
            if n in graph.producers:
                source, here = at[graph.producers[n].id], at[op.id]
                assert source in (0, here) or here == last


@pytest.mark.parametrize("number", range(12))
def test_parts_of_drawn_steps_can_run_one_behind_the_other(number):
    """Branches need nothing of each other, the trunk nothing of them, and nothing needs what joins them."""
    towers = drawn(number)
    _, args = towers.build(jnp.float32)
    graph, found = branches_of(lambda s, b: towers.loss(s[0], b), *args)
    at = {id: 0 for id in found.trunk}
    at.update({id: 1 + n for n, ids in enumerate(found.branches) for id in ids})
    last = len(found.branches) + 1
    at.update(dict.fromkeys(found.merge, last))
    assert_ordered(graph, at, last)
    assert len(found.branches) >= 2
    if len(found.branches) > 2:
        trunk, groups, merge = grouped(graph.operators, found, [[0, 1], [2]])
        at = {**dict.fromkeys(trunk, 0), **dict.fromkeys(merge, 3)}
        at.update({id: 1 + n for n, ids in enumerate(groups) for id in ids})
        assert_ordered(graph, at, 3)
