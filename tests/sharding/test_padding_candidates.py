"""Classes of dims that padding lets more devices divide, against all classes looked at one by one."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import Graph
from autopar.sharding import padding
from tests.search.problems import graph_of

SIZES = st.sampled_from((1, 3, 4, 6, 7, 8, 12, 16, 30, 31, 60))


def layers(sizes: list[int]) -> Graph:
    """Products of a batch with matrices, and a sum over each joined pair of dims."""

    def step(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.reshape(-1).sum()

    weights = [jnp.zeros(pair) for pair in itertools.pairwise(sizes[1:])]
    return graph_of(step, jnp.zeros(sizes[:2]), weights)


def looked_at(graph: Graph, shards: int, most_waste: float) -> tuple[padding.PaddedDims, ...]:
    """The classes whose size has a padding, all of them looked at."""
    types = padding.types_of(graph)
    found = []
    for places in padding.classes(graph):
        size = math.gcd(*(types[name].shape[d] for name, d in places))
        padded = padding.padded_size(size, shards, most_waste)
        if padded != size:
            found.append(padding.PaddedDims((tuple((p, types[p[0]].shape[p[1]] // size * padded) for p in places),)))
    return tuple(found)


@given(st.lists(SIZES, min_size=3, max_size=5), st.sampled_from((2, 4, 8)), st.sampled_from((0.1, 0.5, 1.0)))
def test_candidates_are_all_classes_with_a_padding(sizes, shards, most_waste):
    graph = layers(sizes)
    assert padding.candidates(graph, shards, most_waste) == looked_at(graph, shards, most_waste)


def test_classes_are_not_made_where_no_size_has_a_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers([64, 16, 256, 8])
    monkeypatch.setattr(padding, "_classes", None)
    assert padding.candidates(graph, 8, 0.5) == ()
