"""Cuts anywhere in the forward pass leave each gradient on the stage of its parameter, where there is no flush."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.retrace import step_of
from autopar.microbatch import analyze
from autopar.stages import Layers, assign, stage_parts
from autopar.stages.layers import forward_operators
from examples import gpt, mlp, wide_resnet

MODELS = {
    "mlp": lambda: mlp.build("tiny", abstract=True),
    "gpt": lambda: gpt.build("tiny", abstract=True, tied=False, clip=None),
    "wide_resnet": lambda: wide_resnet.build("tiny", abstract=True),
}


def late(graph, found, cuts, without_flush):
    """Values that stages send after the loop, and whether every backward pass takes what it reads from above."""
    members = tuple((op.id,) for op in forward_operators(graph, found))
    layers = Layers(members, (1.0,) * len(members), (0,) * (len(members) - 1))
    map = assign(graph, found, layers, [*cuts, len(members)], without_flush=without_flush)
    parts = stage_parts(graph, map)
    for part in parts:
        assert all(r.source > part.stage for r in part.received if r.backward), "cotangents travel down"
    return [(part.stage, r.name) for part in parts for r in part.received_late]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_no_cut_leaves_a_gradient_on_another_stage(count):
    """Inputs of the batch lie where the forward pass reads them, and gradients with them, with a flush and without."""
    for model, build in MODELS.items():
        fn, args = build()
        signature, _ = flatten_call(fn, args, {}, SignatureOptions())
        graph = step_of(trace(fn, signature)).graph
        found = analyze(graph, count)
        operators = len(forward_operators(graph, found))
        drawn = random.Random(f"{model} {count}")
        for stages in (2, 2, 2, 3, 4, 4):
            cuts = sorted(drawn.sample(range(1, operators), stages - 1))
            for without_flush in (False, True):
                assert late(graph, found, cuts, without_flush=without_flush) == [], (model, cuts)


@pytest.mark.slow
def test_no_stage_sends_a_constant():
    """What depends on no input is made by every stage that reads it, however large: optax squares imaginary parts."""

    def step(weights, x):
        gradients = jax.grad(lambda ws: (jnp.tanh(x @ ws[0]) @ ws[1]).sum())(weights)
        constant = jnp.square(jnp.zeros((640, 640)))
        return [w - 0.1 * (jnp.square(g) + constant) for w, g in zip(weights, gradients, strict=True)]

    weight = jax.ShapeDtypeStruct((640, 640), jnp.float32)
    args = ([weight, weight], jax.ShapeDtypeStruct((8, 640), jnp.float32))
    signature, _ = flatten_call(step, args, {}, SignatureOptions())
    graph = step_of(trace(step, signature)).graph
    assert [op.primitive for op in graph.operators].count("square") == 3, "the constant is one for both weights"
    sent = late(graph, analyze(graph, 2), [2], without_flush=False)
    assert not [name for _, name in sent if name.startswith("square")], sent
