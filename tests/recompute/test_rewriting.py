"""A step that computes parts of its forward pass again returns what it returned before."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.phases import phase_of
from autopar.ir.verify import verify
from autopar.lower.rewrites import recomputed_bound
from autopar.microbatch import analyze
from autopar.recompute import LEVELS, Phases, select
from autopar.stages.layers import cluster, forward_operators
from examples import gpt, llama, moe
from tests.microbatch.running import numbers, run, traced

TEXT = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 16, "seq": 4, "batch": 4}
EXAMPLES = {
    "gpt": (gpt.build, {**TEXT, "dropout": 0.1, "clip": 1.0}),
    "llama": (llama.build, {**TEXT, "kv_heads": 2}),
    "moe": (moe.build, {}),
}


def phases_of(graph):
    passes = {"forward": set(), "backward": set(), "update": set()}
    for op in graph.operators:
        passes[phase_of(op)].add(op.id)
    return Phases(frozenset(passes["forward"]), frozenset(passes["backward"]))


def step_and_layers(fn, args, count):
    plain, leaves = traced(fn, args)
    return plain, leaves, cluster(plain.graph, analyze(plain.graph, 1), count).members


def assert_same_again(fn, args, level, count=3):
    """``fn`` rewritten returns what it returns as it is; the rewritten graph."""
    plain, leaves, layers = step_and_layers(fn, args, count)
    program, _ = recomputed_bound(plain.program, phases_of(plain.graph), layers, level)
    verify(program.graph)
    got, want = run(replace(plain, program=program), leaves), run(plain, leaves)
    for a, b, o in zip(got, want, plain.graph.outputs, strict=True):
        assert a.dtype == b.dtype
        rtol = 1e-12 if a.dtype == "float64" else 1e-5
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=rtol, atol=rtol / 10, err_msg=o.path)
    return program.graph


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples(name, level, x64):
    build, overrides = EXAMPLES[name]
    assert_same_again(*build(dtype="float64", **overrides), level)


def deep(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w) + jnp.sin(h)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def deep_arguments(layers=4):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    return [jax.random.normal(k, (8, 8)) * 0.3 for k in keys[1:]], jax.random.normal(keys[0], (16, 8))


def selected(level, layers=4):
    plain, _, members = step_and_layers(deep, deep_arguments(), layers)
    return plain.graph, members, select(plain.graph, phases_of(plain.graph), members, level)


def test_dropout_draws_the_same_bits_again():
    def dropped(w, x, key):
        def loss(w):
            h = jnp.tanh(x @ w)
            kept = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0)
            return jnp.mean((kept @ w) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    (w, *_), x = deep_arguments()
    graph = assert_same_again(dropped, (w, x, jax.random.key(1)), "full", count=1)
    again = [op.primitive for op in graph.operators if "recomputed" in op.marks]
    assert "random_bits" in again or "threefry2x32" in again


def test_none_runs_nothing_again():
    graph, _, found = selected("none")
    assert found.groups == ()
    backward = phases_of(graph).backward
    read = {o for op in graph.operators if op.id in backward for o in op.operands}
    assert set(found.saved) <= read


def test_full_holds_what_enters_a_layer_alone():
    graph, members, found = selected("full")
    layer_of = {id: n for n, ids in enumerate(members) for id in ids}
    for name in found.saved:
        maker = layer_of[graph.producers[name].id]
        readers = {layer_of[op.id] for op in graph.operators if op.id in layer_of and name in op.operands}
        assert readers - {maker}, f"{name} does not enter another layer"
    again = [id for group in found.groups for id in group.operators]
    assert any(graph.by_id[id].primitive == "dot_general" for id in again)
    assert len(found.saved) == len(members) - 1


def test_selective_repeats_no_product():
    graph, _, found = selected("selective")
    again = [graph.by_id[id].primitive for group in found.groups for id in group.operators]
    assert again and "dot_general" not in again


def bytes_of(graph, names):
    return sum(graph.types[n].nbytes for n in names)


def test_every_level_holds_no_more_than_the_one_before():
    saved = {level: bytes_of(*((f := selected(level))[0], f[2].saved)) for level in LEVELS}
    assert saved["none"] > saved["selective"] >= saved["full"]


def test_what_is_read_again_lies_behind_a_barrier():
    """Compilers, and the frontend itself, would merge equal operators on equal operands."""
    graph = assert_same_again(deep, deep_arguments(), "full")
    again = [op for op in graph.operators if "recomputed" in op.marks]
    barriers = [op for op in again if op.primitive == "optimization_barrier"]
    assert barriers
    first_runs = {(op.primitive, op.attrs, op.operands) for op in graph.operators if op not in again}
    assert not [op.id for op in again if (op.primitive, op.attrs, op.operands) in first_runs]
    # Each waits for a cotangent, except those of the last layer, whose cotangent may be known from the start.
    backward = {v.name for op in graph.operators if phase_of(op) == "backward" for v in op.results}
    assert sum(any(o in backward for o in op.operands) for op in barriers) >= len(barriers) - 1


def test_effects_are_not_repeated():
    def fn(w, x):
        def loss(w):
            h = jnp.tanh(x @ w)
            jax.debug.callback(lambda v: None, h[0, 0])
            return jnp.mean(jnp.sin(h) * h)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    plain, _ = traced(fn, (jnp.ones((4, 4)), jnp.ones((8, 4))))
    ids = [op.id for op in forward_operators(plain.graph, analyze(plain.graph, 1))]
    found = select(plain.graph, phases_of(plain.graph), [ids], "full")
    assert found.groups
    assert not any(plain.graph.by_id[id].effects for group in found.groups for id in group.operators)
