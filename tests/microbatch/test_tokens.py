"""The proof that positions of a sequence read only earlier ones, and the line where it fails."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import SliceError
from autopar.microbatch.tokens import analyze_tokens, token_count
from examples import gpt, llama
from tests.microbatch.running import step_of, traced

TOKENS, WIDTH = 6, 4


def parameters():
    names = ("q", "k", "v", "o")
    return {n: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for n in names}


def batch():
    x = jax.ShapeDtypeStruct((3, TOKENS, WIDTH), jnp.float32)
    return {"x": x, "y": x, "segment": jax.ShapeDtypeStruct((3, TOKENS), jnp.int32)}


def attention(p, b, masked):
    q, k, v = (b["x"] @ p[n] for n in "qkv")
    scores = masked(jnp.einsum("bqd,bkd->bqk", q, k), b)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.mean((jnp.einsum("bqk,bkd->bqd", weights, v) @ p["o"] - b["y"]) ** 2)


def causal(size=TOKENS):
    return jnp.tril(jnp.ones((size, size), bool))


MASKS = {
    "chosen": lambda s, b: jnp.where(causal(), s, -jnp.inf),
    "largest": lambda s, b: jnp.where(causal(), s, jnp.finfo(s.dtype).min),
    "added": lambda s, b: s + (1.0 - causal().astype(s.dtype)) * -1e9,
    "compared": lambda s, b: jnp.where(jnp.arange(TOKENS)[:, None] < jnp.arange(TOKENS), -1e10, s),
    "window": lambda s, b: jnp.where(causal() & (jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS) < 3), s, -jnp.inf),
    "segments": lambda s, b: jnp.where(causal() & (b["segment"][:, :, None] == b["segment"][:, None, :]), s, -jnp.inf),
    "chosen after a cap": lambda s, b: jnp.where(causal(), 30 * jnp.tanh(s / 30), -jnp.inf),
    "numbers": lambda s, b: jnp.where(causal().astype(jnp.float32) == 0, -1e9, s),
}


def analysis(loss, *args):
    plain, _ = traced(step_of(loss), args or (parameters(), batch()))
    return analyze_tokens(plain.graph)


@pytest.mark.parametrize("mask", MASKS)
def test_causal_masks_are_proven(mask):
    found = analysis(lambda p, b: attention(p, b, MASKS[mask]))
    assert found.tokens == TOKENS
    # Keys and values, and the segments of keys.
    assert len(found.kept) == 2 + (mask == "segments")
    assert len(found.owed) == 2, "their gradients"
    assert all(found.states[n].rows is not None for n in found.kept)
    assert not set(found.forward) & set(found.backward)


def test_what_only_has_an_effect_runs_once_behind_the_loop():
    def loss(p, b):
        jax.debug.callback(lambda mean: None, jnp.mean(b["x"] @ p["q"]))
        return attention(p, b, MASKS["chosen"])

    plain, _ = traced(step_of(loss), (parameters(), batch()))
    found = analyze_tokens(plain.graph)
    silent = {op.id for op in plain.graph.operators if not op.results}
    assert silent and silent <= set(found.after)


WRONG = {
    "no mask": lambda s, b: s,
    "one ahead": lambda s, b: jnp.where(jnp.arange(TOKENS)[:, None] + 1 >= jnp.arange(TOKENS), s, -jnp.inf),
    "turned": lambda s, b: jnp.where(causal().T, s, -jnp.inf) + jnp.where(causal(), 0.0, 1.0),
    "a mask of data": lambda s, b: jnp.where(b["segment"][:, None, :] > 0, s, -jnp.inf),
    "not low": lambda s, b: jnp.where(causal(), s, -1.0),
    "scores themselves": lambda s, b: s * causal(),
}


@pytest.mark.parametrize("mask", WRONG)
def test_other_masks_are_not(mask):
    with pytest.raises(SliceError, match=r"test_tokens\.py:[0-9:]+ \(attention\)(.|\n)*no causal mask leaves out"):
        analysis(lambda p, b: attention(p, b, WRONG[mask]))


def statistic(p, b):
    h = b["x"] @ p["q"]
    mean = h.mean((0, 1))
    return jnp.mean(((h - mean) @ p["k"] - b["y"]) ** 2)


def reversed_total(p, b):
    h = b["x"] @ p["q"]
    later = jax.lax.cumsum(h, axis=1, reverse=True)
    return jnp.mean((later @ p["k"] - b["y"]) ** 2)


def ahead(p, b):
    h = b["x"] @ p["q"]
    kernel, names = jnp.stack([p["k"], p["v"]]), ("NWC", "WIO", "NWC")
    windows = jax.lax.conv_general_dilated(h, kernel, (1,), [(0, 1)], dimension_numbers=names)
    return jnp.mean((windows @ p["o"] - b["y"]) ** 2)


def shifted(p, b):
    h = b["x"] @ p["q"]
    after = jnp.concatenate([h[:, 1:], h[:, :1]], axis=1)
    return jnp.mean((after @ p["k"] - b["y"]) ** 2)


def in_a_loop(p, b):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], jnp.stack([p["q"], p["k"]]))
    return jnp.mean((h - b["y"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "text", "cause"),
    [
        (statistic, "h.mean((0, 1))", "a statistic over the positions"),
        (reversed_total, "reverse=True", "from the last position to the first"),
        (ahead, "windows =", "convolved"),
        (shifted, "after =", "shifted"),
        (in_a_loop, "jax.lax.scan", "write layers one after another"),
    ],
)
def test_the_line_that_mixes_positions(loss, text, cause):
    lines, first = inspect.getsourcelines(loss)
    line = first + next(i for i, found in enumerate(lines) if text in found)
    with pytest.raises(SliceError, match=rf"test_tokens\.py:{line}(:[0-9]+)? \({loss.__name__}\)(.|\n)*{cause}"):
        analysis(loss)


def test_a_running_total_forward_is_causal():
    found = analysis(lambda p, b: jnp.mean((jnp.cumsum(b["x"] @ p["q"], axis=1) @ p["k"] - b["y"]) ** 2))
    assert len(found.kept) == len(found.owed) == 1


@pytest.mark.few(3)
@pytest.mark.parametrize("options", [{}, {"masked": True}, {"dropout": 0.1}, {"kv_heads": 2}, {"tied": False}], ids=str)
def test_gpt_is_causal(options):
    step, args = gpt.build(abstract=True, layers=2, **options)
    plain, _ = traced(step, args)
    found = analyze_tokens(plain.graph)
    kept = [plain.graph.types[n].shape[1:] for n in found.kept]
    assert kept == [(16, options.get("kv_heads", 8), 8)] * 4
    assert len(found.owed) == 4
    assert all(found.states[n].terms == "sum" for n in found.joined), "the loss and gradients of parameters"


@pytest.mark.slow
def test_llama_is_causal_with_rotary_positions():
    step, args = llama.build(abstract=True, unroll=True, remat=False)
    found = analyze_tokens(traced(step, args)[0].graph)
    assert len(found.kept) == len(found.owed) == 4


def test_no_tokens():
    with pytest.raises(SliceError, match="no batch argument with a dim 1"):
        analysis(lambda p, b: jnp.mean((b * p) ** 2), np.ones((8,), np.float32), np.ones((8,), np.float32))


def test_token_count_is_of_most_inputs():
    assert token_count(traced(step_of(statistic), (parameters(), batch()))[0].graph) == TOKENS
