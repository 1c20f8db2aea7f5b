"""`parallelize(wire=...)`: what is sent in narrow formats, read from plans and compiled programs, and the values."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir.formats import WireFormat
from autopar.ir.phases import phase_of
from autopar.lower.hlo import collectives
from autopar.precision import Wire, with_formats
from autopar.search.manual import Manual
from examples import gpt
from tests.end_to_end.clusters import SLOW, toy

INT8 = {"gradients": "int8", "weights": "int8"}
WIDTH = 64


def data(size=64):
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal((size, WIDTH)).astype(np.float32) for n in "xy"}


def weights():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": jax.random.normal(keys[0], (3, WIDTH, WIDTH)) / 8,
        "head": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 8,
        "bias": jax.random.normal(keys[2], (WIDTH,)),
    }


def loss(p, d):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), d["x"], p["layers"])
    return jnp.mean((hidden @ p["head"] + p["bias"] - d["y"]) ** 2)


def sgd(p, d):
    value, grads = jax.value_and_grad(loss)(p, d)
    return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value


def unrolled(p, d):
    def loss(p):
        hidden = d["x"]
        for w in p["layers"]:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean((hidden @ p["head"] + p["bias"] - d["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value


def planned(step, wire=INT8, **options):
    given = {"cluster": SLOW, "search": Manual(dp=8, zero=3), "num_microbatches": 1, "num_stages": 1, **options}
    return autopar.parallelize(step, wire=wire, **given)


def largest_error(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def marks(step, args, wire):
    """(phase, format, shape) of every mark, those inside loops too."""
    signature, _ = flatten_call(step, args, {}, SignatureOptions())
    graph = trace(step, signature, rewrites=[lambda c, p: with_formats(wire, c, p)]).graph
    seen = []

    def walk(graph, phase):
        for op in graph.operators:
            inside = phase_of(op, phase)
            if op.primitive == "wire":
                seen.append((inside, op.attr("format"), op.results[0].type.shape))
            for _, region in op.regions:
                walk(region, inside)

    walk(graph, "update")
    return Counter(seen)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("step", [sgd, unrolled])
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"remat": "full"}], ids=str)
def test_a_step_is_near_the_plain_one_and_what_it_sends_is_planned(step, options):
    args = (weights(), data())
    wire = planned(step, **options)
    plain = jax.jit(step)(*args)
    assert 1e-9 < largest_error(wire(*args), plain) < 2e-3
    compiled = Counter((c.kind, c.full_bytes) for c in collectives(wire.compile(*args).as_text()) if c.dtype == "u8")
    (stage,) = wire.plan(*args).stages
    known = {(c.kind, c.bytes) for c in stage.collectives}
    assert compiled
    assert set(compiled) <= known
    wide_bytes = sum(c.bytes * c.count for c in planned(step, None, **options).plan(*args).stages[0].collectives)
    assert sum(c.bytes * c.count for c in stage.collectives if c.kind != "all-to-all") < wide_bytes


@pytest.mark.parametrize(
    "search", [Manual(dp=8, zero=2), Manual(dp=2, tp=4), pytest.param("alpa", marks=pytest.mark.slow)], ids=str
)
def test_other_plans_are_near_the_plain_step_too(search):
    args = (weights(), data())
    assert largest_error(planned(unrolled, search=search)(*args), jax.jit(unrolled)(*args)) < 2e-3


@pytest.mark.parametrize("microbatches", [1, 4])
def test_each_gradient_that_a_microbatch_scatters_is_sent_in_codes(microbatches):
    """ZeRO-3: every device has a part of the sums, so terms are scattered in the loop, not behind it."""
    args = (weights(), data(256))
    options = {"num_microbatches": microbatches, "cluster": toy(bandwidth=1e6, flops=1e10)}
    wire = planned(unrolled, {"gradients": "int4"}, **options)
    plan = wire.plan(*args)
    assert "gathered or added up as int4 in blocks of 256, as wire= says" in plan.notes
    compiled = collectives(wire.compile(*args).as_text())
    coded = [c for c in compiled if c.dtype == "u8" and c.kind == "all-to-all"]
    assert coded and all(c.times == microbatches for c in coded)
    assert max((c.full_bytes for c in compiled if c.kind in ("reduce-scatter", "all-reduce")), default=0) <= 8 * WIDTH
    assert largest_error(wire(*args), jax.jit(unrolled)(*args)) > 1e-6


@pytest.mark.few(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("zero", [2, 3])
def test_stages_send_each_gradient_in_codes_too(zero, microbatches):
    """Each stage has a part of every sum, to which each microbatch adds: whatever is said is what programs do."""

    def step(p, d):
        def loss(p):
            hidden = d["x"]
            for w in p:
                hidden = jnp.tanh(hidden @ w)
            return jnp.mean((hidden - d["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value

    args = ([jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in jax.random.split(jax.random.key(0), 4)], data())
    options = {"num_microbatches": microbatches, "num_stages": 2, "cluster": toy(bandwidth=1e6, flops=1e10)}
    wire = planned(step, {"gradients": "int4"}, search=Manual(dp=4, pp=2, zero=zero), **options)
    plan = wire.plan(*args)
    assert "gathered or added up as int4 in blocks of 256, as wire= says" in plan.notes
    compiled = [c for text in wire.compile(*args).as_text().split("\n// ") for c in collectives(text)]
    coded = [c for c in compiled if c.dtype == "u8" and c.kind == "all-to-all"]
    assert len(coded) == 4
    (bytes,) = {c.full_bytes for c in coded}
    assert not [c for c in compiled if c.kind in ("reduce-scatter", "all-reduce") and c.full_bytes > 8 * WIDTH]
    said = [c for s in plan.stages for c in s.collectives if (c.kind, c.bytes) == ("all-to-all", bytes)]
    assert sum(c.count for c in said) == 4 * microbatches
    assert 1e-6 < largest_error(wire(*args), jax.jit(step)(*args)) < 2e-3


def test_a_format_in_which_nothing_is_sent_is_noted():
    plan = planned(unrolled, {"gradients": "int8"}, search=Manual(tp=8)).plan(weights(), data())
    (note,) = [n for n in plan.notes if "int8" in n]
    assert note.startswith("wire= has no effect: no collective of this plan sends")


def test_masters_and_their_updates_are_not_rounded():
    """Without gradients the parameters after a step are the parameters before, whatever was sent of them."""

    def still(p, d):
        value, grads = jax.value_and_grad(loss)(p, d)
        return jax.tree.map(lambda w, g: w - 0.0 * g, p, grads), value

    args = (weights(), data())
    got, _ = planned(still)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, args[0])


def test_masters_that_the_update_gathers_are_sent_as_they_are():
    """Sorting takes dims whole, so whichever dim of a master is split, a device needs numbers of others for it."""

    def sorted_both(p):
        return jax.tree.map(lambda w: 0.5 * jnp.sort(w, axis=0) + 0.5 * jnp.sort(w, axis=-1), p)

    def step(p, d):
        value, grads = jax.value_and_grad(loss)(p, d)
        return jax.tree.map(lambda w, g: w - 0.0 * g, sorted_both(p), grads), value

    args = (weights(), data())
    wire = planned(step)
    (stage,) = wire.plan(*args).stages
    sorts = [c for c in stage.collectives if any(o.startswith("sort") for o in c.operators)]
    assert sorts
    got, _ = wire(*args)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(sorted_both)(args[0]))


@pytest.mark.slow
def test_the_compiled_messages_are_those_that_verify_expects():
    args = (weights(), data())
    step = planned(unrolled)
    rows = autopar.verify(step.plan(*args), step, *args, target="cpu:8").rows
    narrow = [r for r in rows if "all-to-all" in str(r) or "all-gather" in str(r)]
    assert narrow
    assert all(r.ok for r in narrow), rows


@pytest.mark.slow
def test_weights_that_lie_whole_are_not_rounded():
    """Nothing is gathered for the passes of a data-parallel plan."""
    args = (weights(), data())
    wire = planned(unrolled, {"weights": "int8"}, search=Manual(dp=8))
    assert not [c for c in collectives(wire.compile(*args).as_text()) if c.dtype == "u8"]
    assert largest_error(wire(*args), jax.jit(unrolled)(*args)) < 1e-6


def test_weights_are_marked_where_passes_read_them_and_gradients_where_the_update_does():
    args = (weights(), data())
    wire = Wire(gradients=WireFormat("int4"), weights=WireFormat("int8"))
    layer, head, stack = (WIDTH, WIDTH), (WIDTH, WIDTH), (3, WIDTH, WIDTH)
    assert layer == head
    seen = marks(sgd, args, wire)
    assert seen["forward", "int8/256", layer] == 2  # a slice in the loop, the head outside
    assert seen["forward", "int8/256", stack] == 1  # the stack in front of the loop
    assert seen["backward", "int8/256", layer] >= 1
    assert seen["backward", "int4/256", layer] == 1  # the row of the loop that stacks gradients
    assert seen["update", "int4/256", stack] == 1
    assert seen["update", "int4/256", head] == 1
    assert not any(phase == "update" and format == "int8/256" for phase, format, _ in seen)
    assert not any(len(shape) < 2 for _, _, shape in seen)


def test_only_roles_that_are_named_are_marked():
    args = (weights(), data())
    only = marks(sgd, args, Wire(weights=WireFormat("int8")))
    assert only
    assert {format for _, format, _ in only} == {"int8/256"}


def test_a_format_that_is_not_narrower_is_none():
    args = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (weights(), data()))
    assert not marks(sgd, args, Wire(weights=WireFormat("bf16"), gradients=WireFormat("bf16")))


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ({"activations": "int8"}, "'activations', which is not a role"),
        ({"weights": "int3"}, "'int3' is not a wire format"),
        ({"gradients": "sign"}, "'sign' is not a wire format"),
        ("int8", "wire='int8' is no mapping"),
    ],
)
def test_wrong_formats_are_errors_at_decoration(wire, says):
    with pytest.raises(AutoparError, match=says):
        autopar.parallelize(sgd, wire=wire)


@pytest.mark.parametrize("block", [64, 256])
def test_messages_have_the_scales_of_their_blocks(block):
    format = WireFormat("int8", block)
    step = planned(unrolled, {"weights": format})
    sent = {(c.kind, c.bytes) for c in step.plan(weights(), data()).stages[0].collectives}
    shard = WIDTH * WIDTH // 8  # of the head
    assert ("all-gather", 8 * (shard + 4 * shard // block)) in sent


@pytest.mark.slow
def test_a_toy_gpt_learns_as_in_full_precision():
    """ZeRO++ (Wang et al., 2023, section 4): the loss of training is within 0.5%."""
    step, (state, batch) = gpt.build("tiny")
    plain, sent = jax.jit(step), planned(step)
    states, losses = [jax.tree.map(jnp.array, state) for _ in range(2)], []
    rng = np.random.default_rng(0)
    for _ in range(60):
        # Sequences that count upwards from a drawn number: they can be learned, not only known by heart.
        tokens = (rng.integers(0, 128, (8, 1)) + np.arange(17)) % 128
        drawn = {
            **batch,
            "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
            "labels": jnp.asarray(tokens[:, 1:], jnp.int32),
        }
        results = [run(s, drawn) for run, s in zip((plain, sent), states, strict=True)]
        states = [s for s, _ in results]
        losses.append([float(metrics["loss"]) for _, metrics in results])
    first, last = np.array(losses[:5]).mean(axis=0), np.array(losses[-10:]).mean(axis=0)
    assert last[0] < 0.7 * first[0]
    assert abs(last[1] - last[0]) < 0.005 * last[0]
