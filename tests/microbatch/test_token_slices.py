"""Steps in slices of tokens: values and gradients are those of the whole sequence at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import SliceError
from autopar.ir.verify import verify
from examples import gpt, llama
from tests.microbatch.running import numbers, run, step_of, traced
from tests.microbatch.sliced_step import sliced_step
from tests.microbatch.test_tokens import MASKS, TOKENS, WIDTH, attention


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def assert_same_in_slices(fn, args, cuts, rtol=1e-9):
    """``fn`` in slices returns what it returns at once, to ``rtol`` of each leaf's norm."""
    plain, leaves = traced(fn, args)
    wanted = run(plain, leaves)
    for lengths in cuts:
        found = sliced_step(plain, lengths)
        verify(found.graph)
        for name, a, b in zip(plain.graph.outputs, run(found, leaves), wanted, strict=True):
            a, b = numbers(a), numbers(b)
            assert a.shape == b.shape and a.dtype == b.dtype
            error = np.linalg.norm((a - b).ravel())
            assert error <= rtol * max(np.linalg.norm(b.ravel()), 1e-30), (name.path, lengths, error)


def drawn(seed=0):
    draw = np.random.default_rng(seed)
    params = {n: draw.normal(size=(WIDTH, WIDTH)) for n in "qkvo"}
    batch = {n: draw.normal(size=(3, TOKENS, WIDTH)) for n in "xy"}
    return params, {**batch, "segment": np.asarray(draw.integers(0, 2, (3, TOKENS)), np.int32)}


@pytest.mark.few(3)
@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask):
    assert_same_in_slices(step_of(lambda p, b: attention(p, b, MASKS[mask])), drawn(), [(TOKENS,), (4, 2), (1, 2, 3)])


def test_running_totals():
    def loss(p, b):
        return jnp.mean((jnp.cumsum(jnp.tanh(b["x"] @ p["q"]), axis=1) @ p["k"] - b["y"]) ** 2)

    assert_same_in_slices(step_of(loss), drawn(), [(3, 3), (1, 4, 1)])


SMALL = {"dtype": "float64", "hidden": 8, "heads": 4, "vocab": 16, "seq": 6, "batch": 2, "clip": None}


@pytest.mark.slow
def test_gpt():
    step, args = gpt.build(layers=1, masked=True, **SMALL)
    assert_same_in_slices(step, args, [(3, 2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dropout": 0.25}, {"kv_heads": 2, "tied": False}], ids=str)
def test_gpt_of_two_layers(options):
    step, args = gpt.build(layers=2, **{**SMALL, **options})
    assert_same_in_slices(step, args, [(3, 2, 1), (2, 2, 2)])


@pytest.mark.slow
def test_llama():
    step, args = llama.build(dtype="float64", hidden=16, vocab=32, seq=8, batch=2, unroll=True, remat=False)
    assert_same_in_slices(step, args, [(5, 3)])


@pytest.mark.parametrize("lengths", [(), (3, 2), (6, 1), (7, -1), (0, 6)])
def test_lengths_are_those_of_a_sequence(lengths):
    plain, _ = traced(step_of(lambda p, b: attention(p, b, MASKS["chosen"])), drawn())
    with pytest.raises(SliceError, match="are not a sequence of 6"):
        sliced_step(plain, lengths)
