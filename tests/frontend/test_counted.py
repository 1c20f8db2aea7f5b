"""Indices that count along a dim become batching dims, and mean what they meant."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.counted import entering_regions
from tests.end_to_end.clusters import FAST
from tests.end_to_end.compare import assert_same
from tests.frontend.reference import check

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.standard_normal((8, 5)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 5, 8), jnp.int32)
TOKENS = jnp.asarray(RNG.standard_normal((4, 6, 5)), jnp.float32)
WORDS = jnp.asarray(RNG.integers(-5, 7, (4, 6)), jnp.int32)


def cross_entropy(logits, labels):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(logits.shape[0]), labels])


def given(*parts):
    """A function of indices, the last of ``parts``, given those that are joined of the others."""
    *columns, fn = parts
    return fn(jnp.concatenate([c[:, None] for c in columns], 1))


def at(x, indices):
    """Elements at indices that are joined elsewhere."""
    dims = tuple(range(indices.shape[-1]))
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=dims, start_index_map=dims)
    return jax.lax.gather(x, indices, numbers, (1,) * x.ndim)


def repeated(fn, x):
    return jax.lax.scan(lambda h, _: (fn(h), None), x, None, length=3)[0]


#: Function, its arguments, and how many dims of the operand become batching dims.
COUNTED = {
    "read": (lambda x, y: x[jnp.arange(8), y], (LOGITS, LABELS), 1),
    "by numpy": (lambda x, y: x[np.arange(8), y], (LOGITS, LABELS), 1),
    "gradient": (jax.grad(cross_entropy), (LOGITS, LABELS), 1),
    "second gradient": (
        lambda x, y: jax.jvp(lambda z: jax.grad(cross_entropy)(z, y), (x,), (x,))[1], (LOGITS, LABELS), 1
    ),
    "two dims": (lambda x, y: x[jnp.arange(4)[:, None], jnp.arange(6), y], (TOKENS, WORDS), 2),
    "two dims transposed": (lambda x, y: x[jnp.arange(4), jnp.arange(6)[:, None], y.T], (TOKENS, WORDS), 2),
    "first dim of two": (lambda x, y: x[jnp.arange(4)[:, None], y % 6], (TOKENS, WORDS), 1),
    "last dim": (lambda x, y: x[y % 4, jnp.arange(6)], (TOKENS, WORDS[0]), 1),
    "gradient of two dims": (jax.grad(lambda x, y: (x[jnp.arange(4)[:, None], jnp.arange(6), y] ** 2).sum()),
                             (TOKENS, WORDS), 2),
    "fill": (lambda x, y: x.at[jnp.arange(4)[:, None], jnp.arange(6), y].get(mode="fill"), (TOKENS, WORDS), 2),
    "clip": (lambda x, y: x.at[jnp.arange(4)[:, None], jnp.arange(6), y].get(mode="clip"), (TOKENS, WORDS), 2),
    "two others": (lambda x, y: x[y[:, 0] % 4, jnp.arange(4), y[:, 1]], (TOKENS[:, :4], WORDS), 1),
    "set": (lambda x, y: x.at[jnp.arange(8), y].set(2.0), (LOGITS, LABELS), 1),
    "add": (lambda x, y: x.at[jnp.arange(8), y].add(x[:, 0]), (LOGITS, LABELS), 1),
    "multiply and drop": (
        lambda x, y: x.at[jnp.arange(4)[:, None], jnp.arange(6), y].mul(3.0, mode="drop"), (TOKENS, WORDS), 2
    ),
    "diagonal": (lambda x, y: x[jnp.arange(5), jnp.arange(5)], (LOGITS[:5], LABELS), 1),
    "under vmap": (lambda x, y: jax.vmap(lambda a, b: a[jnp.arange(6), b])(x, y), (TOKENS, WORDS), 2),
    "in a loop": (lambda x, y: jax.lax.map(lambda r: r[0][jnp.arange(6), r[1]], (x, y)), (TOKENS, WORDS), 1),
    "gradient of a loop": (
        jax.grad(lambda x, y: repeated(lambda h: jnp.sin(h) * h[jnp.arange(8), y][:, None], x).sum()),
        (LOGITS, LABELS), 1
    ),
    "joined before a loop": (
        lambda x, y: given(jnp.arange(8), y, lambda i: repeated(lambda h: h + at(h, i)[:, None], x)),
        (LOGITS, LABELS), 1
    ),
    "joined before a loop in a loop": (
        lambda x, y: given(
            jnp.arange(8), y, lambda i: repeated(lambda h: repeated(lambda k: k + at(k, i).sum(), h), x)
        ),
        (LOGITS, LABELS), 1
    ),
    "three joined before a loop": (
        lambda x, y: given(y[0] % 4, jnp.arange(6), y[1], lambda i: repeated(lambda h: h + at(h, i)[:, None], x)),
        (TOKENS, WORDS), 1
    ),
    "counted before a loop": (
        lambda x, y: (lambda i: repeated(lambda h: h + h[i, y][:, None], x))(jnp.arange(8)),
        (LOGITS, LABELS), 1
    ),
    "joined before a condition": (
        lambda x, y: given(jnp.arange(8), y, lambda i: jax.lax.while_loop(lambda h: at(h, i)[3] < 9, jnp.exp, x)),
        (LOGITS, LABELS), 1
    ),
    "joined before a loop with a condition": (
        lambda x, y: given(
            jnp.arange(8), y,
            lambda i: jax.lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h + 1 + at(h, i).sum() ** 2, x),
        ), (LOGITS, LABELS), 1
    ),
    "joined before a branch": (
        lambda x, y: given(jnp.arange(8), y, lambda i: jax.lax.cond(x[0, 0] > 0, lambda: at(x, i), lambda: x[:, 0])),
        (LOGITS, LABELS), 1
    ),
}  # fmt: skip
OTHERS = {
    "shifted": lambda x, y: x[jnp.arange(8) + 1, y],
    "reversed": lambda x, y: x[jnp.arange(8)[::-1], y],
    "fewer": lambda x, y: x[jnp.arange(4), y[:4]],
    "of no use": lambda x, y: x[y, y],
    "computed": lambda x, y: x[jnp.cumsum(jnp.ones(8, int)) - 1, y],
    "numbers that only begin so": lambda x, y: x[np.array([0, 1, 2, 3, 4, 5, 7, 6]), y],
}


def batching(graph):
    found = []
    for op in graph.operators:
        if op.primitive == "gather" or op.primitive.startswith("scatter"):
            found.append(len(op.ints("operand_batching_dims")))
        found += [n for _, region in op.regions for n in batching(region)]
    return found


@pytest.mark.parametrize("name", COUNTED)
def test_counting_indices_are_batching_dims(name):
    fn, args, dims = COUNTED[name]
    assert max(batching(check(fn, *args).graph)) == dims


@pytest.mark.parametrize("name", OTHERS)
def test_other_indices_are_not(name):
    assert not any(batching(check(OTHERS[name], LOGITS, LABELS).graph))


def test_a_split_batch_reads_without_communication():
    step = autopar.parallelize(
        lambda x, y: x[jnp.arange(8), y] * 2, cluster=FAST, search="data-parallel", batch_argnums=(0, 1)
    )
    assert not step.plan(LOGITS, LABELS).communication
    assert_same(jax.value_and_grad(cross_entropy), (LOGITS, LABELS), cluster=FAST, search="data-parallel")


@pytest.mark.parametrize(
    "params",
    [
        {"num_consts": 2, "num_carry": 1},
        {"ft_in": SimpleNamespace(unpack=lambda: ([0, 0], [0], [0])), "ft_out": None},  # jax 0.12 has trees
    ],
)
def test_what_is_the_same_in_every_trip_enters_a_loop(params):
    counts = [object() for _ in range(4)]
    assert entering_regions("scan", params, counts) == {"body": counts[:2]}
