"""One stage of a pipeline as a step of its own: a graph that planning treats like any other.

Its loop runs the stage's forward and backward operators for each microbatch. What other stages send is an input of one
microbatch's shape, the same in every microbatch (only what it costs to use it matters here); what it sends is carried
through the loop, past `boundary`. After the loop comes the stage's update. Programs for the
runtime are cut from this very graph by `autopar.lower.pipeline.programs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.dtypes import jax_dtype, numpy_dtype
from autopar.errors import MicrobatchError
from autopar.frontend import BoundGraph
from autopar.frontend.build import build_graph
from autopar.ir import Graph, Input, Layout, Literal
from autopar.ir.phases import FORWARD, STAGE, is_stage_loop
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch import add_term, formats_of_sums, neutral, sent_in
from autopar.lower.retrace import (
    Recorder,
    RetracedLoop,
    Step,
    concatenated,
    microbatch_function,
    part_of,
    read,
    retraced_bound,
    run_some,
    run_whole,
    value_layouts,
)
from autopar.lower.rewrites import recomputed_bound
from autopar.microbatch import AXIS, Joined, Microbatching
from autopar.recompute import Level, Phases
from autopar.stages import StageParts
from autopar.stages.parts import StageValue

#: Scope of the loop over microbatches.
_LOOP = "microbatches/jvp(loop)"


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage's graph.

    Args:
        parts: what the stage does.
        program: its graph. Inputs are those of ``parts.graph_inputs``, each named as its text says. Outputs: the
            step's by their paths, then those of ``parts.graph_sends``.
        microbatching: the microbatches of the whole step.
        carried: for each value that the loop carries its name: joined terms, then what is sent.
        stacked: joined values that are concatenated.
    """

    parts: StageParts
    program: BoundGraph
    microbatching: Microbatching
    carried: tuple[str, ...]
    stacked: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The graph, without jax."""
        return self.program.graph


def stage_graph(step: Step, microbatching: Microbatching, parts: StageParts) -> StageGraph:
    """The graph of one stage.

    Args:
        step: the whole step.
        microbatching: its microbatches, as in the `autopar.stages.StageMap`.
        parts: from `autopar.stages.stage_parts`.
    """
    graph = step.graph
    avals = dict(zip((i.name for i in graph.inputs), step.avals, strict=True))
    roles = {i.name: i.role for i in graph.inputs}
    layouts = value_layouts(graph, microbatching)
    shapes = []
    for v in parts.graph_inputs:
        role = roles[v.name] if v.kind == "step" else "batch" if v.of_microbatch else "other"
        shapes.append((str(v), _shape(v, graph, microbatching, layouts, avals), role))
    recorder = Recorder.after(step.program, splices=True)
    work = _StageFunction(step.program, microbatching, layouts, parts, recorder)
    try:
        closed = jax.make_jaxpr(work.step)(*(shape for _, shape, _ in shapes))
    except TypeError as error:
        raise MicrobatchError(
            f"a stage cannot run in microbatches: {str(error).splitlines()[0]}",
            cause="a value of the whole batch that is made once meets one of a microbatch",
            remedy="num_microbatches=1, or num_stages=1",
        ) from error
    paths = [*(graph.outputs[i].path for i in parts.outputs), *map(str, parts.graph_sends)]
    program = build_graph(
        closed, f"{graph.name}/stage {parts.stage}", [(n, role) for n, _, role in shapes], paths, recorder.labels
    )
    traced_graph = program.graph
    names = set(parts.inputs)
    updates = {graph.outputs[i].path: graph.outputs[i].updates for i in parts.outputs}
    outputs = tuple(
        replace(o, updates=u if (u := updates.get(o.path)) in names else None) if n < len(parts.outputs) else o
        for n, o in enumerate(traced_graph.outputs)
    )
    whole = Graph(traced_graph.name, traced_graph.inputs, traced_graph.operators, outputs)
    carried = (*(j.name for j in parts.joined if not _is_stacked(j)), *parts.sent)
    return StageGraph(
        parts,
        replace(program, graph=whole),
        microbatching,
        carried,
        tuple(j.name for j in parts.joined if _is_stacked(j)),
    )


#: Every value of a graph that its outputs name, from the graph, the values of its inputs, and a recorder.
RunGraph: TypeAlias = Callable[[BoundGraph, dict[str, Any], Recorder], Mapping[str, Any]]


def rewritten(stage: StageGraph, run: RunGraph) -> StageGraph:
    """A stage that computes the same in another way.

    Args:
        stage: the stage.
        run: from a graph, the arrays of its inputs and the recorder of scopes to the arrays of all its values.
    """
    bound = stage.program
    shapes = [jax.ShapeDtypeStruct(i.type.shape, jax_dtype(i.type.dtype)) for i in stage.graph.inputs]
    new = retraced_bound(bound, shapes, lambda env, recorder: run(bound, env, recorder))
    return replace(stage, program=_of_step(new, bound))


def with_body(stage: StageGraph, run: RunGraph) -> StageGraph:
    """A stage whose loop over microbatches computes its values in another way; ``stage`` itself without a loop.

    Args:
        stage: the stage.
        run: from the body, the arrays of its inputs and the recorder of scopes to the arrays of all its values.
    """
    op = next(filter(is_stage_loop, stage.graph.operators), None)
    if op is None:
        return stage

    def step(bound: BoundGraph, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        at = bound.graph.operators.index(op)
        env = run_some(bound, bound.graph.operators[:at], env, recorder)
        loop = RetracedLoop.of(bound, op, env, recorder)

        def trip(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = run(loop.region, loop.values(carry, slices), recorder)
            return loop.scan.split_results([read(o.operand, values) for o in loop.region.graph.outputs])

        carry, stacks = loop.over(trip, loop.initial, loop.stacks, loop.scan.length)
        env.update(zip((v.name for v in op.results), [*carry, *stacks], strict=True))
        return run_some(bound, bound.graph.operators[at + 1 :], env, recorder)

    return rewritten(stage, step)


def run_recomputed(
    parts: StageParts,
    layers: Sequence[Sequence[str]],
    level: Level,
    body: BoundGraph,
    env: dict[str, Any],
    recorder: Recorder,
) -> Mapping[str, Any]:
    """Every value of the body of a stage's loop, whose backward pass runs parts of the forward pass again.

    Args:
        parts: of the stage.
        layers: by layer the ids of operators of the step.
        level: of recomputation.
        body: as it is without.
        env: values of its inputs.
        recorder: gives operators that are traced again the scopes of the old ones.
    """
    of_loop, of_origin = set(parts.body), dict[str, list[str]]()
    for op in body.graph.operators:
        origin = body.origins.get(op.id)
        if origin in of_loop:
            of_origin.setdefault(str(origin), []).append(op.id)
    ids = [id for inside in of_origin.values() for id in inside]
    phases = Phases.of(body.graph, ids, frozenset(id for id in ids if body.origins[id] in parts.backward))
    inside = [[id for origin in layer for id in of_origin.get(origin, ())] for layer in layers]
    again, copies = recomputed_bound(body, phases, inside, level)
    recorder.copies.update(copies)
    return run_whole(again, env, recorder)


def _of_step(new: BoundGraph, old: BoundGraph) -> BoundGraph:
    """The graph of a stage that was traced again, whose origins are operators of the step, as those of ``old`` are."""
    if not any(map(is_stage_loop, old.graph.operators)):
        return replace(new, origins=_joined(new.origins, old.origins))
    (op,), (before,) = (filter(is_stage_loop, bound.graph.operators) for bound in (new, old))
    bound, body = new.bounds[op.id], new.bounds[op.id].regions["body"]
    inside = old.bounds[before.id].regions["body"].origins
    body = replace(body, origins=_joined(body.origins, inside))
    loop = replace(bound, regions=MappingProxyType({**bound.regions, "body": body}))
    return replace(new, bounds={**new.bounds, op.id: loop}, origins=_joined(new.origins, old.origins))


def _joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    return {id: second[origin] for id, origin in first.items() if origin in second}


def _is_stacked(j: Joined) -> bool:
    return not j.layout.partial and any(j.layout.dims)


def _shape(
    value: StageValue,
    graph: Graph,
    microbatching: Microbatching,
    layouts: Mapping[str, Layout],
    avals: Mapping[str, Any],
) -> Any:
    """Shape of an input of a stage, which may take a value in the loop, one microbatch's piece, and after it, whole."""
    name = value.name
    if value.kind == "step":
        return avals[name]
    type = graph.types[name]
    if value.kind == "piece":
        dim = microbatching.batch[name]
        shape = (*type.shape[:dim], type.shape[dim] // microbatching.count, *type.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, avals[name].dtype)
    shape = type.shape
    if value.kind == "from":
        shape = layouts[name].local_shape(shape, {AXIS: microbatching.count})
    return jax.ShapeDtypeStruct(shape, numpy_dtype(type.dtype))


class _StageFunction:
    """The stage as a function of flat arrays."""

    def __init__(
        self,
        bound: BoundGraph,
        microbatching: Microbatching,
        layouts: Mapping[str, Layout],
        parts: StageParts,
        recorder: Recorder,
    ) -> None:
        self.bound, self.microbatching, self.layouts = bound, microbatching, layouts
        self.parts, self.recorder = parts, recorder

    def step(self, *arrays: Any) -> list[Any]:
        p, graph = self.parts, self.bound.graph
        given = iter(arrays)
        env = {n: next(given) for n in p.inputs}
        microbatch_inputs = {n: next(given) for n in p.microbatch_inputs}
        received = {r.name: next(given) for r in p.received}
        late = {r.name: next(given) for r in p.received_late}
        met = {r.name: next(given) for r in p.received_met}
        inputs = [i for i in graph.inputs if i.name in env]
        env = run_whole(part_of(self.bound, p.before, inputs, ()), env, self.recorder)
        joined, sent = self._loop({**env, **microbatch_inputs, **met, **received})
        env.update(joined)
        env.update({**met, **late})
        env = run_whole(
            part_of(self.bound, p.late, [Input(n, graph.types[n]) for n in env if n in graph.types], ()),
            env,
            self.recorder,
        )
        outputs = []
        for i in p.outputs:
            operand = graph.outputs[i].operand
            outputs.append(jnp.asarray(scalar(operand)) if isinstance(operand, Literal) else env[operand])
        return [*outputs, *(env[n] for n in (*p.sent_late, *p.sent_met)), *sent]

    def _loop(self, env: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The joined values and the last of each value that is sent."""
        p, types = self.parts, self.bound.graph.types
        if not p.body:
            return {}, []
        taken = [n for n in env if self._is_taken(n)]
        microbatch = microbatch_function(
            self.bound,
            self.microbatching,
            self.recorder,
            p.body,
            taken,
            [*((j.name, j.layout) for j in p.joined), *((n, None) for n in p.sent)],
            self.layouts,
        )
        late = frozenset(p.late)
        formats = formats_of_sums([op for op in self.bound.graph.operators if op.id in late])
        sums = [j for j in p.joined if not _is_stacked(j)]
        rows = [j for j in p.joined if _is_stacked(j)]

        def body(carry: list[Any], number: Any) -> tuple[list[Any], list[Any]]:
            outputs = dict(
                zip([*(j.name for j in p.joined), *p.sent], microbatch(number, [env[n] for n in taken]), strict=True)
            )
            new = [
                add_term(total, jnp.asarray(outputs[j.name]), j.layout, formats.get(j.name, ""))
                if j.layout.partial
                else sent_in(jnp.asarray(outputs[j.name]), formats.get(j.name, ""))
                for j, total in zip(sums, carry, strict=False)
            ]
            return [*new, *(boundary(jnp.asarray(outputs[n])) for n in p.sent)], [
                jnp.asarray(outputs[j.name]) for j in rows
            ]

        start = [
            neutral(types[j.name], j.layout.reduce) if j.layout.partial else self._empty(j.name, j.layout) for j in sums
        ]
        start += [self._empty(n, self.layouts[n]) for n in p.sent]
        with self.recorder.made_for(_LOOP, FORWARD):
            numbers = jnp.arange(self.microbatching.count, dtype=jnp.int32)
        with self.recorder.made_for(_LOOP, FORWARD, STAGE):
            carry, stacks = lax.scan(body, start, numbers)
        joined = {
            j.name: lax.convert_element_type(total, numpy_dtype(types[j.name].dtype)) if j.layout.partial else total
            for j, total in zip(sums, carry, strict=False)
        }
        for j, stack in zip(rows, stacks, strict=True):
            (dim,) = (d for d, axes in enumerate(j.layout.dims) if axes)
            joined[j.name] = concatenated(stack, dim)
        return joined, list(carry[len(sums) :])

    def _is_taken(self, name: str) -> bool:
        p = self.parts
        if name in p.microbatch_inputs or any(r.name == name for r in p.received):
            return True
        return name in self.microbatching.body_inputs and name not in self.microbatching.batch

    def _empty(self, name: str, layout: Layout) -> Any:
        """Zeros of the type of one microbatch's piece of a value, in its layout over the microbatches."""
        type = self.bound.graph.types[name]
        return jnp.zeros(layout.local_shape(type.shape, {AXIS: self.microbatching.count}), jax_dtype(type.dtype))


def _boundary_primitive() -> Primitive:
    primitive = Primitive("stage_boundary")
    primitive.def_abstract_eval(lambda x: x)
    return primitive


stage_boundary_p = _boundary_primitive()


def boundary(x: Any) -> Any:
    """``x``, which leaves a stage: what leaves is a final value, so partial sums end before it.

    Planning takes the primitive as one that has no linear form.
    """
    apply: Any = stage_boundary_p.bind
    return apply(x)
