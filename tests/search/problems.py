"""What the tests of the search share: problems and plans of functions, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize_with
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir import Graph
from autopar.ir.verify import verify
from autopar.search import Problem
from autopar.search.policy import SearchPolicy


def toy(
    devices: int = 8,
    *,
    bandwidth: float = 1e9,
    latency_s: float = 0.0,
    memory: int = 10**9,
    flops: float = 1e9,
    memory_bandwidth: float = 1e10,
    nodes: int = 1,
) -> Cluster:
    """Nodes of equal devices; ``bandwidth`` and ``memory_bandwidth`` in bytes/s, ``memory`` in bytes a device."""
    device = Device("toy", memory, memory_bandwidth, (("f32", flops),))
    link = LinkSpec(bandwidth, latency_s)
    return Cluster("toy", (NodeGroup(nodes, devices // nodes, device, link, link),))


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    """The verified graph of a function."""
    signature, _ = flatten_call(fn, args, {}, SignatureOptions())
    graph = trace(fn, signature).graph
    verify(graph)
    return graph


def problem_of(fn: Callable[..., Any], args: Sequence[Any], cluster: Cluster, **options: Any) -> Problem:
    """The problem of planning ``fn``; ``options`` are fields of parts: see `problem_with`."""
    return problem_with(Problem(graph_of(fn, *args), cluster, CostModel(cluster)), **options)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def problem_with(problem: Problem, **values: Any) -> Problem:
    """A problem with another request, job, or other part; each name belongs to one of them."""
    for part in ("request", "job", "solving", "subproblem", "reporting"):
        own = {f.name for f in fields(getattr(problem, part))}
        given = {name: values.pop(name) for name in own & values.keys()}
        problem = replace(problem, **{part: replace(getattr(problem, part), **given)})
    assert not values, f"unknown: {sorted(values)}"
    return problem


def with_policy(parallel: ParallelFunction[..., Any], policy: SearchPolicy) -> ParallelFunction[..., Any]:
    """A decorated function with other thresholds of the search."""
    return parallelize_with(parallel.function, replace(parallel.options, policy=policy))


def momentum(loss: Callable[..., Any], parameters: Any, *batch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of gradient descent with momentum, and its abstract arguments."""

    def step(state: Any, *batch: Any) -> Any:
        weights, moments = state
        gradients = jax.grad(loss)(weights, *batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments

    return step, ((parameters, parameters), *batch)
