"""Runs a `BoundGraph` on one device, operator by operator: what the graph says, without any planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar._compat.jaxprs import plain_params
from autopar.frontend import Bound, BoundGraph, SignatureOptions, Traced, flatten_call, trace
from autopar.ir import Literal, graph_text, parse_graph, verify


def scalar(literal: Literal) -> np.ndarray:
    """The array of no dims that a literal stands for."""
    for read in (int, float, complex):
        try:
            return np.asarray(read(literal.text), numpy_dtype(literal.type.dtype))
        except ValueError:
            continue
    return np.asarray({"True": True, "False": False}[literal.text])


def evaluate(bound: BoundGraph, arrays: Sequence[Any]) -> list[Any]:
    """Outputs of the graph for ``arrays``, one an input."""
    env: dict[str, Any] = dict(zip((i.name for i in bound.graph.inputs), arrays, strict=True))

    def read(operand: str | Literal) -> Any:
        return jnp.asarray(scalar(operand)) if isinstance(operand, Literal) else env[operand]

    for op in bound.graph.operators:
        values = [read(o) for o in op.operands]
        if op.primitive == "constant":
            made: Any = [bound.constants[op.id]]
        else:
            run = {"scan": _scan, "while": _while, "cond": _cond}.get(op.primitive, _plain)
            made = run(bound.bounds[op.id], values)
        for v, array in zip(op.results, made, strict=True):
            if not v.type.dtype.startswith(("key<", "token")):
                assert (array.shape, array.dtype) == (v.type.shape, numpy_dtype(v.type.dtype)), v
            env[v.name] = array
    return [read(o.operand) for o in bound.graph.outputs]


def _plain(bound: Bound, values: list[Any]) -> list[Any]:
    made = bound.primitive.bind(*values, **bound.primitive.get_bind_params(dict(bound.params)))
    return list(made) if bound.primitive.multiple_results else [made]


def _scan(bound: Bound, values: list[Any]) -> list[Any]:
    p, body = plain_params("scan", bound.params), bound.regions["body"]
    consts, carry = p["num_consts"], p["num_consts"] + p["num_carry"]

    def step(state: Any, row: Any) -> tuple[Any, Any]:
        made = evaluate(body, [*values[:consts], *state, *row])
        return made[: p["num_carry"]], made[p["num_carry"] :]

    state, rows = lax.scan(step, values[consts:carry], values[carry:], length=p["length"], reverse=p["reverse"])
    return [*state, *rows]


def _while(bound: Bound, values: list[Any]) -> list[Any]:
    at = bound.params["cond_nconsts"]
    end = at + bound.params["body_nconsts"]

    def more(state: list[Any]) -> Any:
        (flag,) = evaluate(bound.regions["cond"], [*values[:at], *state])
        return flag

    def step(state: list[Any]) -> list[Any]:
        flag = more(state)  # under vmap one decision a row: rows that are done keep what they have
        made = evaluate(bound.regions["body"], [*values[at:end], *state])
        return [
            jnp.where(flag.reshape(flag.shape + (1,) * (new.ndim - flag.ndim)), new, old)
            for new, old in zip(made, state, strict=True)
        ]

    return list(lax.while_loop(lambda state: more(state).any(), step, values[end:]))


def _cond(bound: Bound, values: list[Any]) -> list[Any]:
    branches = [bound.regions[str(i)] for i in range(len(bound.regions))]
    index, *rest = values
    made = lax.switch(index.astype(np.int32), [lambda *a, b=b: evaluate(b, a) for b in branches], *rest)
    return list(made)


def traced(
    fn: Callable[..., Any], *args: Any, options: SignatureOptions | None = None, batch_argnums=None, **kwargs: Any
) -> Traced:
    """The traced call, whose graph is well formed, deterministic, and survives being printed."""
    options = options or SignatureOptions()
    signature, _ = flatten_call(fn, args, kwargs, options)
    found = trace(fn, signature, batch_argnums=batch_argnums)
    verify(found.graph)
    assert graph_text(parse_graph(graph_text(found.graph))) == graph_text(found.graph)
    assert set(found.program.bounds) | set(found.program.constants) == {op.id for op in found.graph.operators}
    return found


def check(fn: Callable[..., Any], *args: Any, options: SignatureOptions | None = None, **kwargs: Any) -> Traced:
    """Asserts that the graph of a call computes what the function does, bit for bit, and returns the trace."""
    options = options or SignatureOptions()
    found = traced(fn, *args, options=options, **kwargs)
    _, leaves = flatten_call(fn, args, kwargs, options)

    def plain(leaves: Sequence[Any]) -> Any:
        args, kwargs = found.signature.arguments(leaves)
        with_static = jax.tree.leaves(fn(*args, **kwargs))
        return [leaf for leaf in with_static if isinstance(leaf, jax.Array | np.ndarray | bool | int | float | complex)]

    want = jax.jit(plain)(leaves)
    got = jax.jit(lambda leaves, constants: evaluate(found.program, [*leaves, *constants]))(leaves, found.closed_over)
    assert len(want) == len(got)
    for a, b in zip(got, want, strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return found


def primitives(found: Traced) -> list[str]:
    """Names of the operators' primitives, in order."""
    return [op.primitive for op in found.graph.operators]
