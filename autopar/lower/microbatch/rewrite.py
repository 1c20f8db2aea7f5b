"""Gradient accumulation as a rewriting of the step: before, ``lax.scan`` over microbatches, after.

Where examples meet there are several such loops (`autopar.microbatch.meetings`), one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Input
from autopar.ir.phases import FORWARD, MICROBATCHES
from autopar.lower.microbatch.join import add_term, formats_of_sums, neutral
from autopar.lower.microbatch.parts import (
    Recorder,
    concatenated,
    microbatch_function,
    microbatches_of,
    part_of,
    run_whole,
)
from autopar.lower.microbatch.retrace import retraced
from autopar.microbatch import Microbatching, MicrobatchLoop, analyze_in_loops


def microbatched(traced: Traced, count: int) -> Traced:
    """The step that computes the same in ``count`` microbatches, one after another.

    Args:
        traced: a step.
        count: number of microbatches; 1 gives ``traced`` itself.

    Raises:
        MicrobatchError: as `autopar.microbatch.analyze_in_loops`.
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
