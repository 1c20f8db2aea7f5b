"""Programs of a stage whose microbatches pass in slices of tokens: one for each pass and slice.

A forward program takes its tokens, what earlier stages made of them, and the keys and values that earlier slices left
on the stage. Backward programs run from the last slice to the first; what a slice owes earlier ones (gradients of their
keys and values) goes from program to program. TeraPipe (Li et al., ICML'21), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from autopar.errors import SliceError
from autopar.frontend import Bound, BoundGraph
from autopar.ir import Graph, Layout, Literal, Operand, Operator
from autopar.ir.analysis import names_read
from autopar.ir.primitives import is_generator
from autopar.lower.interpreter import Interpreter, Sharded
from autopar.lower.localize.base import AxisIndex, scalar
from autopar.lower.pipeline.loop import Leaving, Loop
from autopar.lower.pipeline.stage_program import Port, StageProgram
from autopar.microbatch.tokens import (
    SliceGraph,
    TokenSlices,
    TokenSlicing,
    TokenStart,
    TokenState,
    analyze_from,
    fact_of_literal,
    facts_of,
    owed_to,
    rows_of,
    slice_graph,
    spread_of,
)
from autopar.schedule import ValueRef, Work
from autopar.stages.parts import StageValue


@dataclass(frozen=True, eq=False)
class SlicedStage:
    """The loop over microbatches of one stage, of which each pass runs one slice of the tokens at a time.

    Args:
        stage: its number.
        graph: its whole graph.
        loop: its loop.
        values: which value of the step an input of the graph is.
        entering: ports of what the loop takes, by input of its body.
        layouts: of the values of the body.
        decisions: of the stage's plan.
        groups: kinds of passes with the ids of the operators that they run.
        whole: the analysis of the whole step.
        slices: the cut of a sequence.
    """

    stage: int
    graph: Graph
    loop: Loop
    values: Mapping[str, StageValue]
    entering: Mapping[str, Port]
    layouts: Mapping[str, Layout]
    decisions: Sharded
    groups: Sequence[tuple[str, set[str]]]
    whole: TokenSlicing
    slices: TokenSlices

    @property
    def body(self) -> Graph:
        """The body of the loop, without what adds up totals."""
        ids = {id for _, some in self.groups for id in some}
        graph = self.loop.graph
        kept = tuple(op for op in graph.operators if op.id in ids or is_generator(op))
        outputs = tuple(
            replace(graph.outputs[0], operand=x.operand, path=str(n), type=graph.type_of(x.operand), updates=None)
            for n, x in enumerate(self.loop.leaving)
        )
        return replace(graph, operators=kept, outputs=outputs)

    @cached_property
    def bound(self) -> BoundGraph:
        """The graph of the loop's body, with the primitives and parameters that jax binds to run its operators."""
        return replace(self.loop.body, graph=self.body)

    @cached_property
    def slicing(self) -> TokenSlicing:
        """Slicing of the body.

        Raises:
            SliceError: it does not, with the user's line.
        """
        tokens, states, inputs = self.whole.tokens, dict[str, TokenState](), dict[str, int]()
        facts_outside = facts_of(self.graph, tokens, frozenset(op.id for op in self.graph.operators))
        facts, data = {}, set[str]()
        operands = {inner: operand for inner, operand, _ in self.loop.entering}
        for i in self.body.inputs:
            operand = operands.get(i.name)
            value = self.values.get(operand) if isinstance(operand, str) else None
            states[i.name] = TokenState()
            if value is not None and value.kind == "from":
                states[i.name] = self._received(value.name)
            elif value is not None and value.kind == "piece" and value.name in self.whole.inputs:
                inputs[i.name] = self.whole.inputs[value.name]
                states[i.name] = TokenState(rows=inputs[i.name])
            if value is not None and value.kind == "piece":
                data.add(i.name)
            fact = fact_of_literal(operand) if isinstance(operand, Literal) else facts_outside.get(operand or "")
            if fact is not None:
                facts[i.name] = fact
        return analyze_from(self.body, TokenStart(tokens, inputs, states, frozenset(data), facts))

    def _received(self, name: str) -> TokenState:
        state = self.whole.states.get(name)
        if state is None:
            raise SliceError(
                f"stages pass on {name}, which is known only after all slices",
                cause="a stage ends after a value that all positions go into",
                remedy="another number of stages",
            )
        return state

    # -- programs --------------------------------------------------------------------------------

    def programs(self) -> list[StageProgram]:
        """The programs of all passes and slices."""
        self._check_layouts()
        return [self._program(n, k) for n in range(len(self.groups)) for k in range(self.slices.count)]

    def _check_layouts(self) -> None:
        """Raises SliceError where the plan splits tokens over devices, or a whole result is wanted of slices."""
        for name, layout in self.layouts.items():
            state = self.slicing.states.get(name)
            dims = () if state is None else (state.rows, state.keys)
            if any(d is not None and layout.dims[d] for d in dims):
                raise SliceError(
                    f"stage {self.stage} splits {name} over its devices along the tokens",
                    cause="a plan that splits sequences, next to slices in time",
                    remedy="a mesh_shape or constraints that leave tokens whole, or token_slices=None",
                )
        for x in self.loop.leaving:
            state = self._state(x)
            known = state is not None and (x.reduce is None or state.is_whole or state.terms == x.reduce)
            if not known and not self._is_spread(x):
                raise SliceError(
                    f"{x.name} is known only after all slices of a microbatch",
                    cause="a result that is no sum over positions, as a maximum over the tokens",
                    remedy="leave that result out of the step, or token_slices=None",
                )

    def _is_spread(self, x: Leaving) -> bool:
        """Whether what leaves is summed over microbatches and each slice has its own positions of it.

        Gradients of embeddings of positions are so: a slice adds its rows, with zeros for all other positions.
        """
        state = self._state(x)
        return x.reduce == "sum" and state is not None and state.rows is not None and state.keys is None

    def _state(self, x: Leaving) -> TokenState | None:
        return TokenState() if isinstance(x.operand, Literal) else self.slicing.states.get(x.operand)

    @cached_property
    def _makers(self) -> Mapping[str, str]:
        """Kind of the pass that makes each value of the loop over slices."""
        graph, inside = self.body, self.slicing.operators
        kinds = {id: kind for kind, ids in self.groups for id in ids}
        return {v.name: kinds[op.id] for op in graph.operators if op.id in inside for v in op.results}

    def _leaving(self, kind: str, k: int) -> list[Leaving]:
        """Values that leave the loop in a pass of a slice; values that all slices share leave with the first pass of a
        kind.
        """
        first = 0 if kind == "forward" else self.slices.count - 1
        some = []
        for x in self.loop.leaving:
            state = self._state(x)
            assert state is not None
            default = "backward" if self._is_backward(x) else "forward"
            maker = self._makers.get(x.operand, default) if isinstance(x.operand, str) else "forward"
            if maker == kind and (k == first or not state.is_whole):
                some.append(x)
        return some

    def _is_backward(self, x: Leaving) -> bool:
        maker = self.body.producers.get(x.operand) if isinstance(x.operand, str) else None
        return maker is not None and maker.id in self.loop.backward

    def _held(self, n: int) -> list[str]:
        """Values of a pass that later ones read, or those of other slices."""
        ids = self.slicing.operators
        later = {id for _, some in self.groups[n + 1 :] for id in some}
        read = names_read(op for op in self.body.operators if op.id in later and op.id in ids)
        read |= set(self.slicing.kept)
        read |= {
            x.operand for kind, _ in self.groups[n + 1 :] for x in self._leaving(kind, 0) if isinstance(x.operand, str)
        }
        return [name for name, kind in self._makers.items() if kind == self.groups[n][0] and name in read]

    def _program(self, n: int, k: int) -> StageProgram:
        kind, ids = self.groups[n]
        held, leaving = self._held(n), self._leaving(kind, k)
        wanted = list(dict.fromkeys([*held, *(x.operand for x in leaving if isinstance(x.operand, str))]))
        inside = [id for id in ids if id in self.slicing.operators]
        spread = [x.operand for x in leaving if isinstance(x.operand, str) and self._is_spread(x)]
        part = slice_graph(self.body, self.slicing, self.slices, k, inside, wanted, spread=spread)
        types = {o.path: o.type for o in part.graph.outputs}
        writes: list[tuple[Operand, Port]] = []
        sums: list[tuple[Operand, Port, str]] = []
        for x in leaving:
            operand = x.operand if isinstance(x.operand, Literal) else self._named(x.operand, k)
            if isinstance(x.operand, str) and self._is_spread(x):
                operand = spread_of(x.operand, k)
            type = operand.type if isinstance(operand, Literal) else types[operand]
            whole = isinstance(x.operand, Literal) or self.slicing.states[x.operand].is_whole
            if x.reduce is None:
                writes.append((operand, Port(ValueRef("from", x.name, None, None if whole else k), type, x.layout)))
            else:
                sums.append((operand, Port(ValueRef("sum", x.name, self.stage), type, x.layout), x.reduce))
        for name in held:
            writes.append((rows_of(name, k), self._port(name, k, types[rows_of(name, k)])))
        for name in [v for v in self.slicing.owed if owed_to(v, k) in types]:
            writes.append((owed_to(name, k), self._owed_port(name, k, types[owed_to(name, k)])))
        return self._bound_program(Work(kind, self.stage, k), part, writes, sums)  # type: ignore[arg-type]

    def _named(self, name: str, k: int) -> str:
        return name if self.slicing.states[name].is_whole else rows_of(name, k)

    def _layout(self, name: str) -> Layout:
        return self.layouts.get(name) or Layout.replicated(self.body.types[name].rank)

    def _port(self, name: str, k: int, type: Any) -> Port:
        return Port(ValueRef("activation", name, self.stage, k), type, self._layout(name))

    def _owed_port(self, name: str, k: int, type: Any) -> Port:
        return Port(ValueRef("activation", f"owed {name}", self.stage, k), type, self._layout(name))

    def _read_port(self, part: SliceGraph, name: str, type: Any) -> Port:
        """The port of an input of a slice's graph."""
        if name not in part.sources:
            return self.entering[name]
        value, k = part.sources[name]
        if name == owed_to(value, k):
            return self._owed_port(value, k, type)
        port = self.entering.get(value)
        if port is None:
            return self._port(value, k, type)
        return replace(port, ref=replace(port.ref, slice=k), type=type)

    def _sharded(self, part: SliceGraph) -> Sharded:
        """The plan's decisions for the operators of a slice."""
        prefix, old = self.loop.prefix, self.decisions
        operands, results = dict(old.operands), dict(old.results)
        for op in part.graph.operators:
            origin = part.origins.get(op.id)
            if origin is not None and prefix + origin in old.results:
                operands[prefix + op.id] = old.operands[prefix + origin]
                results[prefix + op.id] = old.results[prefix + origin]
            elif origin is None:
                layout = self._layout(part.cuts[op.id])
                taken = tuple(None if isinstance(o, Literal) else layout for o in op.operands)
                operands[prefix + op.id], results[prefix + op.id] = taken, (layout,)
        return replace(old, operands=operands, results=results)

    def _bound_program(
        self,
        work: Work,
        part: SliceGraph,
        writes: Sequence[tuple[Operand, Port]],
        sums: Sequence[tuple[Operand, Port, str]],
    ) -> StageProgram:
        literals = {inner: o for inner, o, _ in self.loop.entering if isinstance(o, Literal)}
        number = self.loop.number
        given: list[_Given] = []
        for i in part.graph.inputs:
            if i.name == number:
                given.append(_Given(Layout.replicated(0), is_number=True))
            elif i.name in literals:
                given.append(_Given(Layout.replicated(0), constant=scalar(literals[i.name])))
            else:
                port = self._read_port(part, i.name, i.type)
                given.append(_Given(port.layout, port))
        reads = tuple(g.port for g in given if g.port is not None)
        asked = [*writes, *((o, p) for o, p, _ in sums)]
        outputs = tuple(replace(self.loop.graph.outputs[0], operand=o, path=p.name, type=p.type) for o, p in asked)
        program = bound_slice(self.bound, part)
        program = replace(program, graph=replace(program.graph, name=str(work), outputs=outputs))
        decisions, prefix = self._sharded(part), self.loop.prefix
        layouts, wanted = [g.layout for g in given], [p.layout for _, p in asked]

        def on_device(microbatch: Any, arrays: Sequence[Any], index: AxisIndex) -> list[Any]:
            remaining = iter(arrays)
            values = [microbatch if g.is_number else next(remaining) if g.port else g.constant for g in given]
            interpreter = Interpreter(replace(decisions, index=index), prefix)
            return interpreter.run(program, values, layouts, wanted)

        return StageProgram(work, reads, tuple(p for _, p in writes), tuple((p, r) for _, p, r in sums), on_device)


@dataclass(frozen=True, eq=False)
class _Given:
    """An input of a slice's graph: an array, a number that the program states, or that of the microbatch."""

    layout: Layout
    port: Port | None = None
    constant: Any = field(default=None)
    is_number: bool = False


_FURTHER: Mapping[str, Primitive] = MappingProxyType(
    {"add": lax.add_p, "concatenate": lax.concatenate_p, "pad": lax.pad_p, "slice": lax.slice_p}
)


def bound_slice(bound: BoundGraph, sliced: SliceGraph) -> BoundGraph:
    """A slice's graph with the primitives and parameters that jax binds to run its operators.

    Args:
        bound: the whole graph.
        sliced: a slice of it.
    """
    bounds: dict[str, Bound] = {}
    for op in sliced.graph.operators:
        origin = sliced.origins.get(op.id)
        if origin is None:
            bounds[op.id] = Bound(_FURTHER[op.primitive], dict(op.attrs), MappingProxyType({}))
        elif origin in bound.bounds:
            bounds[op.id] = _resized(op, bound.graph.by_id[origin], bound.bounds[origin])
    return BoundGraph(sliced.graph, bounds, bound.constants)


def _resized(op: Operator, whole: Operator, bound: Bound) -> Bound:
    """The parameters of an operator with the sizes of its slice."""
    if op.attrs == whole.attrs:
        return bound
    old = dict(whole.attrs)
    changed = {key: value for key, value in op.attrs if old[key] != value}
    return Bound(bound.primitive, {**bound.params, **changed}, bound.regions)
