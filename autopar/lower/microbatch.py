"""Gradient accumulation as a rewriting of the step: before, ``lax.scan`` over microbatches, after.

`microbatched` returns an ordinary traced function with a loop, that planning and lowering treat like any other. Where
examples meet there are several such loops (`autopar.microbatch.meetings`), one after another. `add_term` and `neutral`
sum the terms of a reduction over microbatches, for stages of pipelines too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Input, Layout, Operator, TensorType
from autopar.ir.formats import WireFormat
from autopar.ir.phases import FORWARD, MICROBATCHES
from autopar.ir.primitives import CASTS, RESHAPES, wire_of
from autopar.lower.retrace import (
    Recorder,
    concatenated,
    microbatch_function,
    microbatches_of,
    part_of,
    retraced,
    run_whole,
)
from autopar.microbatch import Microbatching, MicrobatchLoop, analyze_in_loops
from autopar.precision.wire import wired

_HALVES = ("bf16", "f16")
_VIEWS = CASTS | RESHAPES | {"neg", "transpose"}


def microbatched(traced: Traced, count: int) -> Traced:
    """The step that computes the same in ``count`` microbatches, one after another.

    Args:
        traced: a step.
        count: number of microbatches; 1 gives ``traced`` itself.

    Raises:
        MicrobatchError: the step cannot be cut into so many microbatches.
    """
    if count == 1:
        return traced
    loops = analyze_in_loops(traced.graph, count)
    return retraced(traced, lambda env, recorder: _step(traced.program, loops, recorder, env))


def _step(
    bound: BoundGraph, loops: Sequence[MicrobatchLoop], recorder: Recorder, env: dict[str, Any]
) -> dict[str, Any]:
    for of_step in loops:
        graph, microbatching = of_step.graph, of_step.microbatching
        rest = replace(bound, graph=graph)
        env = run_whole(part_of(rest, microbatching.before, graph.inputs, ()), env, recorder)
        env.update(loop(rest, microbatching, recorder, env))
        known = [Input(n, graph.types[n]) for n in env if n in graph.types]
        env = run_whole(part_of(rest, microbatching.after, known, ()), env, recorder)
    return env


def loop(bound: BoundGraph, microbatching: Microbatching, recorder: Recorder, env: dict[str, Any]) -> dict[str, Any]:
    """The joined values, from a scan over microbatches."""
    types = bound.graph.types
    microbatch = microbatch_function(
        bound,
        microbatching,
        recorder,
        microbatching.body,
        microbatching.body_inputs,
        [(j.name, j.layout) for j in microbatching.joined],
    )
    after = frozenset(microbatching.after)
    formats = formats_of_sums([op for op in bound.graph.operators if op.id in after])
    terms = [j for j in microbatching.joined if j.layout.partial]
    rows = [n for n in microbatching.body_inputs if n in microbatching.batch]
    stacks = [microbatches_of(env[n], microbatching.count, microbatching.batch[n]) for n in rows]

    def body(totals: list[Any], of_microbatch: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        number, slices = of_microbatch
        given = {**{n: env[n] for n in microbatching.body_inputs}, **dict(zip(rows, slices, strict=True))}
        outputs = microbatch(number, [given[n] for n in microbatching.body_inputs])
        summed = iter(totals)
        new, out = [], []
        for j, piece in zip(microbatching.joined, outputs, strict=True):
            if j.layout.partial:
                new.append(add_term(next(summed), jnp.asarray(piece), j.layout, formats.get(j.name, "")))
            else:
                out.append(jnp.asarray(piece))
        return new, out

    start = [neutral(types[j.name], j.layout.reduce) for j in terms]
    numbers = jnp.arange(microbatching.count, dtype=jnp.int32)
    with recorder.made_for("jvp(loop)", FORWARD, MICROBATCHES):
        totals, stacked = lax.scan(body, start, (numbers, stacks))
    joined: dict[str, Any] = {}
    sums, rows_out = iter(totals), iter(stacked)
    for j in microbatching.joined:
        if j.layout.partial:
            joined[j.name] = lax.convert_element_type(next(sums), numpy_dtype(types[j.name].dtype))
        else:
            (dim,) = (d for d, axes in enumerate(j.layout.dims) if axes)
            joined[j.name] = concatenated(next(rows_out), dim)
    return joined


def accumulator_dtype(type: TensorType) -> Any:
    """Dtype in which terms add up: sums of halves in float32, as one long sum inside a matrix product would."""
    return np.dtype("float32") if type.dtype in _HALVES else numpy_dtype(type.dtype)


def neutral(type: TensorType, reduce: str) -> Any:
    """An accumulator before the first term: a whole array of ``type``'s shape."""
    dtype = accumulator_dtype(type)
    if reduce == "sum":
        return jnp.zeros(type.shape, dtype)
    if reduce in ("and", "or"):
        return jnp.full(type.shape, reduce == "and", dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        least = -jnp.inf
    elif dtype == np.dtype(bool):
        return jnp.full(type.shape, reduce == "min", dtype)
    else:
        info: Any = jnp.iinfo
        return jnp.full(type.shape, info(dtype).min if reduce == "max" else info(dtype).max, dtype)
    return jnp.full(type.shape, least if reduce == "max" else -least, dtype)


def formats_of_sums(operators: Sequence[Operator]) -> dict[str, str]:
    """By value the format in which it is sent to ``operators``, which run after a loop, as ``wire=`` asks for.

    Casts, reshapes and signs between the value and the mark change nothing of it.
    """
    formats: dict[str, str] = {}
    for op in reversed(operators):
        if op.primitive == "wire":
            formats[str(op.operands[0])] = wire_of(op)
        elif op.primitive in _VIEWS and op.results[0].name in formats and op.reads:
            formats.setdefault(op.reads[0], formats[op.results[0].name])
    return formats


def add_term(total: Any, term: Any, layout: Layout, format: str = "") -> Any:
    """``total`` with one more ``term``, which devices send in ``format`` where they have parts of the total."""
    term = sent_in(lax.convert_element_type(term, total.dtype), format)
    return {
        "sum": lax.add,
        "max": lax.max,
        "min": lax.min,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
    }[layout.reduce](total, term)


def sent_in(term: Any, format: str) -> Any:
    """``term``, which devices send in ``format`` where that is not empty."""
    return wired(term, WireFormat.parse(format)) if format else term
