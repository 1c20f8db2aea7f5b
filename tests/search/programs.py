"""Small random train-step-like functions: up to ten operators that read each other in all ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir import Graph
from autopar.ir.verify import verify
from tests.search.problems import f32, graph_of

MOST_OPERATORS = 10
SIZES = (2, 4, 8, 4, 8, 6)


def random_graph(rng: np.random.Generator, most: int = MOST_OPERATORS) -> Graph:
    """A graph of 2 to ``most`` operators (those in loops count) without inputs that nothing reads."""
    while True:
        fn, args = random_function(int(rng.integers(2**31)), int(rng.integers(1, most)))
        graph = graph_of(fn, *args)
        returned = {p for o in graph.outputs for p in (o.operand, o.updates)}
        read = returned.union(*(op.operands for op in graph.operators))
        graph = replace(graph, inputs=tuple(i for i in graph.inputs if i.name in read))
        if 2 <= count(graph) <= most:
            verify(graph)
            return graph


def count(graph: Graph) -> int:
    """Operators of a graph, those in regions too."""
    return sum(1 + sum(count(r) for _, r in op.regions) for op in graph.operators)


def random_function(seed: int, steps: int) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """``(state, batch) -> (state, results)`` of ``steps`` random steps, and the shapes of its arguments."""
    rng = np.random.default_rng(seed)
    shape = [(int(rng.choice(SIZES)), int(rng.choice(SIZES))) for _ in range(3)]
    state = {"p": f32(*shape[0])}
    if rng.random() < 0.4:
        state["m"] = f32(*shape[0])
    batch = {"x": f32(shape[1][0], shape[0][0]), "y": f32(*shape[2])}
    if rng.random() < 0.3:
        batch["s"] = f32(2, shape[0][0], shape[0][0])
    draws = int(rng.integers(2**31))

    def fn(state: Any, batch: Any) -> Any:
        draw = np.random.default_rng(draws)
        pool = [*batch.values(), *state.values()]
        for _ in range(steps):
            pool.append(_step(pool, batch, draw))
        new = {}
        for name, old in state.items():
            alike = [v for v in pool[len(batch) + len(state) :] if v.shape == old.shape and v.dtype == old.dtype]
            if alike and draw.random() < 0.8:
                new[name] = old - alike[-1]
            elif draw.random() < 0.5:
                new[name] = old * 0.9
            else:
                new[name] = old
        kept = [pool[-1]]
        if draw.random() < 0.4:
            kept.append(_pick(pool, draw))
        if draw.random() < 0.1:
            kept.append(jnp.float32(1.0))
        return new, kept

    return fn, (state, batch)


def _pick(pool: list[Any], draw: np.random.Generator) -> Any:
    """A value; late ones more often."""
    return pool[-1 - min(int(draw.geometric(0.45)) - 1, len(pool) - 1)]


def _step(pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    kinds = sorted(_KINDS)
    while True:
        kind = kinds[int(draw.integers(len(kinds)))]
        found = _KINDS[kind](_pick(pool, draw), pool, batch, draw)
        if found is not None and found.ndim <= 3 and found.size <= 1024:
            return found


def _elementwise(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    unary = (lax.tanh, lax.neg, lambda v: v * v, lambda v: v + 1.0, lax.sign)
    return unary[int(draw.integers(len(unary)))](v)


def _binary(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    alike = [u for u in pool if u.shape == v.shape and u.dtype == v.dtype]
    functions = (lax.add, lax.mul, lax.sub, lax.max)
    return functions[int(draw.integers(len(functions)))](v, alike[int(draw.integers(len(alike)))])


def _matmul(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    if v.ndim != 2:
        return None
    fits = [u for u in pool if u.ndim == 2 and v.shape[1] in u.shape and u.dtype == v.dtype]
    if not fits:
        return None
    u = fits[int(draw.integers(len(fits)))]
    return lax.dot_general(v, u, (((1,), (u.shape.index(v.shape[1]),)), ((), ())))


def _reduce(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    if v.ndim == 0:
        return None
    axes = (int(draw.integers(v.ndim)),) if draw.random() < 0.7 else tuple(range(v.ndim))
    return lax.reduce_max(v, axes) if draw.random() < 0.3 else lax.reduce_sum(v, axes)


def _broadcast(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    n = int(draw.choice(SIZES))
    at = int(draw.integers(v.ndim + 1))
    shape = [*v.shape[:at], n, *v.shape[at:]]
    dims = [d for d in range(v.ndim + 1) if d != at]
    return lax.broadcast_in_dim(v, shape, dims)


def _transpose(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    return lax.transpose(v, [int(d) for d in draw.permutation(v.ndim)]) if v.ndim > 1 else None


def _reshape(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    if v.ndim >= 2 and draw.random() < 0.5:
        return lax.reshape(v, (v.shape[0] * v.shape[1], *v.shape[2:]))
    if v.ndim >= 1 and v.shape[-1] % 4 == 0:
        return lax.reshape(v, (*v.shape[:-1], v.shape[-1] // 2, 2))
    return None


def _generated(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    made = lax.full_like(v, float(draw.integers(2)))
    return lax.add(v, made) if draw.random() < 0.5 else lax.add(made, v)


def _indexing(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    if v.ndim == 0 or v.shape[0] < 4:
        return None
    half = v.shape[0] // 2
    return (
        lax.slice_in_dim(v, 0, half),
        lax.concatenate([v, v], 0),
        lax.cumsum(v, 0),
        lax.rev(v, (0,)),
    )[int(draw.integers(4))]


def _convert(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    return lax.convert_element_type(v, jnp.bfloat16 if v.dtype == jnp.float32 else jnp.float32)


def _scan(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    if draw.random() < 0.5 or v.ndim == 0 or v.dtype != jnp.float32:
        return None
    if "s" in batch and v.ndim == 2 and v.shape[1] == batch["s"].shape[1]:
        return lax.scan(lambda c, w: (lax.dot(c, w), None), v, batch["s"])[0]
    alike = [u for u in pool if u.shape == v.shape and u.dtype == v.dtype]
    u = alike[int(draw.integers(len(alike)))]
    carry, out = lax.scan(lambda c, _: (lax.tanh(c) + u, lax.reduce_sum(c, (0,))), v, None, length=3)
    return carry if draw.random() < 0.5 else out


def _cond(v: Any, pool: list[Any], batch: Any, draw: np.random.Generator) -> Any:
    scalars = [u for u in pool if u.ndim == 0]
    if not scalars:
        return None
    return lax.cond(scalars[-1] > 0, lax.tanh, lambda v: v * 2, v)


_KINDS: dict[str, Callable[[Any, list[Any], Any, np.random.Generator], Any]] = {
    "binary": _binary,
    "binary again": _binary,
    "broadcast": _broadcast,
    "cond": _cond,
    "convert": _convert,
    "elementwise": _elementwise,
    "generated": _generated,
    "indexing": _indexing,
    "matmul": _matmul,
    "matmul again": _matmul,
    "matmul and again": _matmul,
    "reduce": _reduce,
    "reduce again": _reduce,
    "reshape": _reshape,
    "scan": _scan,
    "transpose": _transpose,
}


def primitives(graph: Graph) -> set[str]:
    """Primitives of a graph, those in regions too."""
    found = {op.primitive for op in graph.operators}
    return found.union(*(primitives(r) for op in graph.operators for _, r in op.regions))
