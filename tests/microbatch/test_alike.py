"""Loops that are alike but for the names of their operators are looked into once, and each is told under its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.microbatch import analyze
from tests.microbatch.running import traced


def layer(scope: str) -> Callable[[Any, Any], tuple[Any, None]]:
    def body(carry: Any, weights: Any) -> tuple[Any, None]:
        with jax.named_scope(scope):
            return jnp.tanh(carry @ weights), None

    return body


def step(weights: Any, x: Any) -> Any:
    for scope in ("first", "second", "second"):
        x, _ = lax.scan(layer(scope), x, weights)
    return jnp.sum(x)


def test_operators_of_each_loop_are_told_under_their_own_names() -> None:
    graph = traced(step, (jnp.ones((3, 4, 4)), jnp.ones((8, 4))))[0].graph
    found = analyze(graph, 2)
    loops = [op for op in graph.operators if op.primitive == "scan"]
    inner = {f"{op.id}/body/{o.id}" for op in loops for _, region in op.regions for o in region.operators}
    assert len(inner) == 6 and inner <= found.results.keys() and inner <= found.operands.keys()
    products = [found.results[name] for name in sorted(inner) if "dot_general" in name]
    assert products[0] == products[1] == products[2]
