"""What kernels read from memory on TPUs, where they run inside of the one that makes what they read."""

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster
from autopar.search.intra.build import build
from tests.search.problems import f32, problem_of

_ROWS, _WIDTH = 512, 256
_BYTES = 4 * _ROWS * _WIDTH


def _moved(fn, *args, cluster="tpu-v5e"):
    """Bytes in memory that each operator moves, by primitive, products left out."""
    problem = problem_of(fn, args, Cluster.load(cluster).part(0, 1))
    (mesh,) = problem.cluster.logical_meshes((1,))
    moved = {}
    for site in build(problem, mesh).sites:
        moved.setdefault(site.op.primitive, []).append(site.work.bytes)
    return moved


@pytest.mark.parametrize("cluster, read", [("tpu-v5e", 0), ("dgx-a100", _BYTES)])
def test_a_sum_of_a_product_is_taken_as_it_is_made(cluster, read):
    moved = _moved(lambda x, w: jnp.sum(x @ w, 1), f32(_ROWS, 64), f32(64, _WIDTH), cluster=cluster)
    assert moved["reduce_sum"] == [read + 4 * _ROWS]


def test_of_a_softmax_the_maximum_is_taken_with_scores_and_the_sum_after_it():
    moved = _moved(lambda x, w: jax.nn.logsumexp(x @ w, 1), f32(_ROWS, 64), f32(64, _WIDTH))
    assert moved["reduce_max"] == [4 * _ROWS]
    assert moved["reduce_sum"] == [_BYTES + 2 * 4 * _ROWS]


def test_an_input_is_read():
    moved = _moved(lambda x: jnp.sum(jnp.tanh(x), 1), f32(_ROWS, _WIDTH))
    assert moved["reduce_sum"] == [_BYTES + 4 * _ROWS]


def test_of_two_products_the_first_is_read_beside_the_second():
    def fn(x, w, v):
        return jnp.tanh(x @ w) * (x @ v)

    moved = _moved(fn, f32(_ROWS, 64), f32(64, _WIDTH), f32(64, _WIDTH))
    assert moved["mul"] == [2 * _BYTES]


@pytest.mark.slow
def test_a_kernel_that_began_before_what_is_needed_hands_nothing_on():
    def fn(x, w, v):
        first, second = x @ w, x @ v
        kept = jnp.tanh(first)
        return kept, kept * second

    moved = _moved(fn, f32(_ROWS, 64), f32(64, _WIDTH), f32(64, _WIDTH))
    assert moved["tanh"] == [_BYTES]
    assert moved["mul"] == [3 * _BYTES]
