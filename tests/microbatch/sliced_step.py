"""`sliced_step`: a step that runs slice by slice, forward from the first one and backward from the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Input, Layout
from autopar.ir.analysis import dependents, names_made, names_read
from autopar.lower.microbatch import add_term, neutral
from autopar.lower.pipeline.sliced import bound_slice
from autopar.lower.retrace import Recorder, part_of, retraced, run_whole
from autopar.microbatch import AXIS
from autopar.microbatch.tokens import (
    TokenSlices,
    TokenSlicing,
    analyze_tokens,
    check_lengths,
    rows_of,
    slice_graph,
)


def sliced_step(traced: Traced, lengths: Sequence[int], dim: int = 1) -> Traced:
    """The step that computes the same in slices of tokens, one after another on one device.

    Args:
        traced: a step.
        lengths: tokens of each slice, from the first.
        dim: the dim of batch inputs that is one of tokens.

    Raises:
        SliceError: as `autopar.microbatch.tokens.analyze_tokens` and `check_lengths`.
    """
    slicing = analyze_tokens(traced.graph, dim)
    slices = check_lengths(lengths, slicing.tokens)
    return retraced(traced, lambda env, recorder: _SlicedPasses(traced.program, slicing, slices, recorder).step(env))


class _SlicedPasses:
    """The passes of all slices."""

    def __init__(self, bound: BoundGraph, slicing: TokenSlicing, slices: TokenSlices, recorder: Recorder) -> None:
        self.bound, self.slicing, self.slices, self.recorder = bound, slicing, slices, recorder
        graph = bound.graph
        forward = [graph.by_id[id] for id in slicing.forward]
        backward = [graph.by_id[id] for id in slicing.backward]
        later = {*names_read(backward), *slicing.kept, *slicing.joined}
        self.held = [n for n in names_made(forward) if n in later]
        self.last = [n for n in names_made(backward) if n in slicing.joined]
        of_inputs = dependents(graph.operators, [i.name for i in graph.inputs])
        self.given = {v.name for op in of_inputs for v in op.results}
        self.rows: dict[str, Any] = {}

    def step(self, env: dict[str, Any]) -> dict[str, Any]:
        """The values of the step's graph that its outputs name, from its inputs."""
        graph = self.bound.graph
        env = run_whole(part_of(self.bound, self.slicing.whole, graph.inputs, ()), env, self.recorder)
        for k in range(self.slices.count):
            self._run(k, self.slicing.forward, self.held, env)
        for k in reversed(range(self.slices.count)):
            self._run(k, self.slicing.backward, self.last, env)
        env.update((n, self._joined(n)) for n in self.slicing.joined)
        late = part_of(self.bound, self.slicing.after, [Input(n, graph.types[n]) for n in env], ())
        return run_whole(late, env, self.recorder)

    def _run(self, k: int, ids: Sequence[str], wanted: Sequence[str], env: dict[str, Any]) -> None:
        given = self.given & env.keys()
        part = slice_graph(self.bound.graph, self.slicing, self.slices, k, ids, wanted, given)
        self.recorder.copies.update(part.origins)
        self.recorder.copies.update((id, id) for id in part.cuts)
        program = bound_slice(self.bound, part)
        values = {i.name: env[i.name] if i.name in env else self.rows[i.name] for i in program.graph.inputs}
        computed = run_whole(program, values, self.recorder)
        self.rows.update((o.path, computed[o.path]) for o in program.graph.outputs)

    def _joined(self, name: str) -> Any:
        state, type = self.slicing.states[name], self.bound.graph.types[name]
        parts = [self.rows[rows_of(name, k)] for k in range(self.slices.count)]
        if not state.terms:
            return lax.concatenate(parts, state.rows if state.rows is not None else 0)
        layout = Layout(((),) * type.rank, (AXIS,), state.terms)
        total = neutral(type, state.terms)
        for part in parts:
            total = add_term(total, jnp.asarray(part), layout)
        return lax.convert_element_type(total, numpy_dtype(type.dtype))
