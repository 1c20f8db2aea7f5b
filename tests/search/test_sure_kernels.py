"""What is sure of kernels is in every form of a step: microbatches, recomputation, stages. Nothing is solved."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api.steps import TracedStep
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.plan import StepForm
from autopar.recompute import LEVELS
from autopar.search import Job, Problem
from autopar.search.bound import BoundedStep, Workers, least_of_all_s
from autopar.search.intra import build
from autopar.search.sure_work import sure_works
from autopar.stages import cluster as clustered
from tests.search.problems import problem_with, toy

#: Devices whose kernels are known, devices that fuse products, and plain ones, where every operator has a kernel.
DEVICES = {
    "kernels": Cluster.load("dgx-a100").part(0, 1),
    "fused products": Cluster.load("tpu-v5e").part(0, 1),
    "plain": toy(1, flops=1e12, memory_bandwidth=1e11),
}
KINDS = ("gelu", "norm", "softmax", "swish", "mask", "square", "residual")


def layer(kind, x, w, scale):
    y = x @ w
    if kind == "gelu":
        return jax.nn.gelu(y)
    if kind == "norm":
        y = y - y.mean(-1, keepdims=True)
        return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale
    if kind == "softmax":
        return jax.nn.softmax(y, axis=-1) * x
    if kind == "swish":
        return jax.nn.silu(y) * (y + x)
    if kind == "mask":
        return jnp.where(y > 0, y, 0.1 * x) + jnp.exp(-(y**2))
    if kind == "square":
        return (y.astype(jnp.bfloat16) ** 2).astype(jnp.float32) + scale
    return x + jnp.tanh(y) * jnp.cos(x)


def step_of(kinds, width, batch, scanned, momentum):
    """The source of a train step of layers of some kinds, and its arguments."""

    def loss(state, x, target):
        weights, scales = state
        if scanned:

            def body(x, of):
                for n, kind in enumerate(kinds):
                    x = layer(kind, x, of[0][n], of[1][n])
                return x, None

            x, _ = jax.lax.scan(body, x, (weights, scales))
        else:
            for n, kind in enumerate(kinds):
                x = layer(kind, x, weights[n], scales[n])
        return jnp.mean((jax.nn.log_softmax(x) * target).sum(-1))

    def step(state, moments, x, target):
        value, grads = jax.value_and_grad(loss)(state, x, target)
        moments = jax.tree.map(lambda m, g: momentum * m + g, moments, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m / (1.0 + jnp.abs(m)), state, moments), moments, value

    shapes = (len(kinds), width, width), (len(kinds), width)
    if scanned:
        shapes = tuple((3, *s) for s in shapes)
    state = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    if not scanned:
        state = tuple([jax.ShapeDtypeStruct(s[1:], jnp.float32)] * len(kinds) for s in shapes)
    batches = [jax.ShapeDtypeStruct((batch, width), jnp.float32)] * 2
    signature, _ = flatten_call(step, (state, state, *batches), {}, SignatureOptions())
    return TracedStep(trace(step, signature), (), (), 1)


def kernels_s(graph, cluster, count, **demands):
    """Seconds of all kernels of a graph on one device."""
    problem = Problem(graph, cluster, CostModel(cluster), job=Job(num_microbatches=count))
    (mesh,) = cluster.logical_meshes(None)
    return sum(float(s.seconds.min()) for s in build(problem_with(problem, **demands), mesh).sites)


def sure_s(graph, cluster, *, in_stages):
    """Seconds of what is sure, on one device."""
    cost = CostModel(cluster)
    return sum(w.runs * cost.least_s(w.least, 1) for w in sure_works(graph, cost, in_stages=in_stages))


def check_forms(step, cluster, counts=(1, 2, 4)):
    """No form has fewer seconds of kernels than are sure. Returns what is sure over the fewest of one stage."""
    graph = step.traced.graph
    least_s, of_one, of_several = np.inf, *(sure_s(graph, cluster, in_stages=s) for s in (False, True))
    assert of_several <= of_one * (1 + 1e-12)
    for count, level in itertools.product(counts, LEVELS):
        form_s = kernels_s(step.in_form(StepForm(count, level)).graph, cluster, count)
        assert of_one <= form_s * (1 + 1e-9), (count, level, of_one / form_s)
        least_s = min(least_s, form_s)
    source = step.layered(None, 1).source
    for count in counts[1:]:
        layers = clustered(graph, source.microbatches(count), 10**6).members
        for cut, level in itertools.product(range(1, len(layers)), LEVELS):
            runs = (layers[:cut], layers[cut:])
            members = tuple(tuple(id for one in run for id in one) for run in runs)
            sliced, in_stages_s = source.slice(count, members), 0.0
            for stage, run in enumerate(runs):
                part = sliced.graphs[stage]
                if level != "none":
                    ends = tuple(one[-1] for one in run[:-1])
                    part = source.in_form(members, stage, StepForm(count, level, layer_ends=ends)).graph
                arriving = sliced.arriving(stage)
                in_stages_s += kernels_s(part, cluster, count, separate_programs=True, arriving=arriving)
            assert of_several <= in_stages_s * (1 + 1e-9), (count, cut, level, of_several / in_stages_s)
    return of_one / least_s


@pytest.mark.parametrize("devices", DEVICES)
def test_every_form_has_the_kernels_that_are_sure(devices):
    assert 0.5 < check_forms(step_of(("gelu", "norm"), 256, 512, False, 0.9), DEVICES[devices], (1, 2)) <= 1 + 1e-9


def gated_step(width, batch, length):
    """The source of a train step of a gated recurrence over a sequence, whose loop has elementwise work alone."""

    def loss(weights, x, target):
        gates, values = (x @ w for w in weights)

        def body(h, of):
            gate, value = jax.nn.sigmoid(of[0]), jnp.tanh(of[1])
            h = gate * h + (1 - gate) * value
            return h, h

        _, states = jax.lax.scan(body, jnp.zeros((batch, width)), (gates, values))
        return jnp.mean((states @ weights[0] - target) ** 2)

    def step(weights, x, target):
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x, target), strict=True)]

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2
    batches = [jax.ShapeDtypeStruct((length, batch, width), jnp.float32)] * 2
    signature, _ = flatten_call(step, (weights, *batches), {}, SignatureOptions())
    return TracedStep(trace(step, signature), (), (), 1)


def test_what_a_loop_carries_and_what_products_take_of_its_slices_is_written_in_each_trip():
    """Forward the state, backward its gradient and those of both inputs: read and written, without products.

    Recomputation decides what goes into stacks, so copies of these are not sure: the program is one without them.
    """
    step, cluster = gated_step(64, 1024, 16), replace(DEVICES["kernels"], stack="plain")
    inside = [w for w in sure_works(step.traced.graph, CostModel(cluster), in_stages=False) if w.loop]
    state_bytes = 4 * 1024 * 64
    assert {w.phase for w in inside} == {"forward", "backward"}
    assert all(w.least.bytes >= 2 * state_bytes and w.runs in (15, 16) for w in inside)
    assert len(inside) >= 3
    counts = [sure_s(step.traced.graph, cluster, in_stages=False)]
    for count, level in itertools.product((1, 2), LEVELS):
        counts.append(kernels_s(step.in_form(StepForm(count, level)).graph, cluster, count))
    assert 0.5 < counts[0] / min(counts[1:]) <= 1 + 1e-9  # most of the work is sure


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("number", range(8))
def test_every_form_of_drawn_steps_has_the_kernels_that_are_sure(devices, number):
    random = np.random.default_rng((20261125, number))
    kinds = tuple(random.choice(KINDS, int(random.integers(1, 4))))
    width, batch = (int(2 ** random.integers(4, 11)) for _ in range(2))
    check_forms(step_of(kinds, width, max(8, batch), number % 4 == 3, 0.9), DEVICES[devices])


def test_matrices_that_may_be_stacked_are_counted_as_one():
    """Factorizations of an optimizer run as one kernel (`autopar.lower.batched_matrices`), and cost one start."""

    def step(weights, x):
        grads = jax.grad(lambda w: sum(jnp.mean((x @ v) ** 2) for v in w))(weights)
        return [v - jnp.linalg.qr(g)[0] for v, g in zip(weights, grads, strict=True)]

    weights, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    signature, _ = flatten_call(step, (weights, x), {}, SignatureOptions())
    traced, cluster = trace(step, signature), Cluster.load("dgx-a100").part(0, 2)
    graph, cost = TracedStep(traced, (), (), 2).in_form(StepForm()).graph, CostModel(cluster)
    stacked, apart = (list(sure_works(g, cost, in_stages=False)) for g in (graph, traced.graph))
    assert sum(w.stacks for w in stacked) == 1 < sum(w.stacks for w in apart) == 6
    ones = [
        least_of_all_s(
            BoundedStep(traced.graph, cost, [w for w in works if w.stacks], ()), [Workers(1, 2, 2)], [(1, 1)]
        )
        for works in (stacked, apart)
    ]
    assert ones[1] <= ones[0] * (1 + 1e-9)
