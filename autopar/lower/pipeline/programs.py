"""Programs of one stage, cut from its graph: before, forward, meeting, backward, weight, and parts of the update."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.frontend import BoundGraph
from autopar.ir import Graph, Input, Layout, Literal, Operand, Operator, Output, TensorType
from autopar.ir.primitives import is_generator
from autopar.lower.interpreter import Interpreter, Sharded
from autopar.lower.localize.base import AxisIndex, scalar
from autopar.lower.pipeline.loop import Leaving, Loop, find_loop, layouts_of, needed_of
from autopar.lower.pipeline.sliced import SlicedStage
from autopar.lower.pipeline.stage_graph import StageGraph
from autopar.lower.pipeline.stage_program import Port, StageProgram
from autopar.microbatch.tokens import TokenSlices, TokenSlicing
from autopar.schedule import ValueRef, Work
from autopar.schedule.dataflow import RefKind
from autopar.stages.parts import StageValue

_MomentKind = typing.Literal["meeting", "update"]
#: Kinds of what other programs made of a microbatch, or of its tokens.
_PASSED_ON = ("activation", "from")


def stage_programs(
    stage: StageGraph,
    decisions: Sharded,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    *,
    split: bool,
    separate_state: bool = False,
    slices: tuple[TokenSlicing, TokenSlices] | None = None,
) -> tuple[StageProgram, ...]:
    """The programs of a stage.

    Args:
        stage: its graph.
        decisions: its plan's decisions.
        inputs: layout of each input of the graph.
        outputs: layout of each output.
        split: whether the weight gradients get a program of their own (zero-bubble schedules).
        separate_state: whether the update is two programs, of new state (part 0) and of what else is returned (part 1).
        slices: how the whole step runs in slices of tokens, and which; None for whole microbatches.
    """
    return _Cutter(stage, decisions, inputs, outputs, separate_state, slices).programs(split)


@dataclass(frozen=True)
class _Source:
    """Origin of a program's operators.

    Args:
        bound: the stage's graph, or the body of its loop.
        prefix: of ids and names there.
        literals: inputs of the graph that are literals.
        number: the input that is the number of the microbatch, or "".
    """

    bound: BoundGraph
    prefix: str = ""
    literals: Mapping[str, Literal] = field(default_factory=dict)
    number: str = ""


class _Cutter:
    """Cuts the graph of one stage."""

    def __init__(
        self,
        stage: StageGraph,
        decisions: Sharded,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        separate_state: bool = False,
        slices: tuple[TokenSlicing, TokenSlices] | None = None,
    ) -> None:
        self.stage, self.decisions, self.separate_state, self.slices = stage, decisions, separate_state, slices
        self.s = stage.parts.stage
        self.graph = stage.graph
        self.input_layouts = dict(zip((i.name for i in self.graph.inputs), inputs, strict=True))
        self.input_values = dict(zip((i.name for i in self.graph.inputs), stage.parts.graph_inputs, strict=True))
        self.output_layouts = tuple(outputs)
        self.loop = find_loop(stage, decisions)
        self.layouts = layouts_of(self.graph, self.input_layouts, decisions, "")
        self.types = self.graph.types

    def programs(self, split: bool) -> tuple[StageProgram, ...]:
        programs = []
        loop = self.loop
        if loop is not None:
            before = self._before(loop)
            programs += [] if before is None else [before]
            programs += self._microbatch_programs(loop, split)
        return (*programs, *self._updates())

    # -- names ---------------------------------------------------------------------------------

    def _own(self, kind: RefKind, name: str) -> ValueRef:
        """A value that only this stage has."""
        return ValueRef(kind, name, self.s)

    def _input(self, name: str) -> Port:
        """The port of an input of the stage's graph, as it lies between programs."""
        layout, type = self.input_layouts[name], self.types[name]
        value = self.input_values[name]
        if value.kind == "from" or value.kind == "late" or value.kind == "met":
            return Port(ValueRef(value.kind, value.name), type, layout)
        ref = self._own("batch" if value.kind == "piece" else "in", value.name)
        return Port(ref, type, layout, name in self.decisions.hosted)

    # -- before the loop -----------------------------------------------------------------------

    def _entering(self, loop: Loop) -> list[tuple[str, Port, bool]]:
        """(body input, port, made by the before program) of all that the loop takes; literals are left out."""
        entering = []
        for inner, operand, layout in loop.entering:
            if isinstance(operand, Literal):
                continue
            value = self.input_values.get(operand)
            moved_alone = value is not None and (value.of_microbatch or value.kind == "met")
            direct = moved_alone or (value is not None and self.input_layouts[operand] == layout)
            if direct:
                port = self._input(operand)
                entering.append((inner, Port(port.ref, port.type, layout, port.host), False))
            else:
                entering.append(
                    (inner, Port(self._own("loop", f"{operand}{layout}"), self.types[operand], layout), True)
                )
        return entering

    def _before(self, loop: Loop) -> StageProgram | None:
        results = [
            (operand, p) for (_, operand, _), (_, p, m) in zip(self._real(loop), self._entering(loop), strict=True) if m
        ]
        early = self._early_values(loop)
        if not results and not early:
            return None
        unique = list({p.name: (operand, p) for operand, p in results}.values())
        wanted = [*unique, *((n, Port(self._own("early", n), self.types[n], self.layouts[n])) for n in early)]
        ops = needed_of(self.graph, [o for o, _ in wanted], self._early_ids(loop))
        return self._program(
            Work("before", self.s), _Source(self.stage.program), ops, wanted, [], self._top_ports(ops, wanted)
        )

    def _real(self, loop: Loop) -> list[tuple[str, Operand, Layout]]:
        return [e for e in loop.entering if not isinstance(e[1], Literal)]

    def _early_ids(self, loop: Loop | None) -> set[str]:
        """Operators before the loop: those that the loop needs."""
        if loop is None:
            return set()
        everything = {op.id for op in self.graph.operators if op.id != loop.op.id}
        return {op.id for op in needed_of(self.graph, loop.op.operands, everything)}

    def _early_values(self, loop: Loop) -> list[str]:
        """Values made before the loop that the update reads."""
        ids = self._early_ids(loop)
        early = {v.name for op in self.graph.operators if op.id in ids and not is_generator(op) for v in op.results}
        read: dict[str, None] = {}
        for op in self.graph.operators:
            if op.id not in ids and op.id != loop.op.id:
                read.update(dict.fromkeys(o for o in op.reads if o in early))
        for o, _ in self._late_outputs():
            if isinstance(o.operand, str) and o.operand in early:
                read[o.operand] = None
        return list(read)

    def _late_outputs(self) -> list[tuple[Output, Layout]]:
        """Outputs of the graph that are made after the loop, each with its layout."""
        late = len(self.graph.outputs) - len(self.stage.parts.sent)
        return list(zip(self.graph.outputs, self.output_layouts, strict=True))[:late]

    def _top_ports(self, ops: Sequence[Operator], wanted: Sequence[tuple[Operand, Port]]) -> dict[str, Port]:
        """Ports of the graph's inputs that ``ops`` and ``wanted`` read."""
        names = {o for op in ops for o in op.reads} | {o for o, _ in wanted if isinstance(o, str)}
        return {i.name: self._input(i.name) for i in self.graph.inputs if i.name in names}

    # -- one microbatch ------------------------------------------------------------------------

    def _microbatch_programs(self, loop: Loop, split: bool) -> list[StageProgram]:
        graph = loop.graph
        entering = {inner: port for inner, port, _ in self._entering(loop)}
        literal = {inner: o for inner, o, _ in loop.entering if isinstance(o, Literal)}
        inner_layouts = {inner: layout for inner, _, layout in loop.entering}
        layouts = layouts_of(graph, inner_layouts, self.decisions, loop.prefix)
        computing = {op.id for op in graph.operators if not is_generator(op)}
        totals = self._total_ids(loop)
        forward, backward = computing - loop.backward - totals, set(loop.backward) - totals
        groups: list[tuple[str, set[str]]] = [("forward", forward), ("backward", backward)]
        if split:
            sent = [x.operand for x in loop.leaving if x.reduce is None]
            inputs = {op.id for op in needed_of(graph, sent, backward)} & backward
            groups = [("forward", forward), ("backward", inputs), ("weight", backward - inputs)]
        if self.slices is not None:
            return SlicedStage(
                self.s, self.graph, loop, self.input_values, entering, layouts, self.decisions, groups, *self.slices
            ).programs()
        maker = {v.name: kind for op in graph.operators for kind, ids in groups if op.id in ids for v in op.results}
        leaves = {kind: [x for x in loop.leaving if self._made_in(x, maker) == kind] for kind, _ in groups}
        programs = []
        passed: dict[str, Port] = {}
        for n, (kind, ids) in enumerate(groups):
            later = {v for _, others in groups[n + 1 :] for v in self._reads(graph, others)}
            later |= {x.operand for k, _ in groups[n + 1 :] for x in leaves[k] if isinstance(x.operand, str)}
            held = [v.name for op in graph.operators if op.id in ids for v in op.results if v.name in later]
            residuals: list[tuple[Operand, Port]] = [
                (v, Port(self._own("activation", v), graph.types[v], layouts[v])) for v in held if v in layouts
            ]
            wanted: list[tuple[Operand, Port]] = []
            sums: list[tuple[Operand, Port, str]] = []
            for x in leaves[kind]:
                type = graph.type_of(x.operand)
                if x.reduce is None:
                    wanted.append((x.operand, Port(ValueRef("from", x.name), type, x.layout)))
                else:
                    sums.append((x.operand, Port(self._own("sum", x.name), type, x.layout), x.reduce))
            asked = [o for o, _ in (*wanted, *residuals)] + [o for o, _, _ in sums]
            ops = needed_of(graph, asked, ids)
            ports = {**entering, **passed}
            programs.append(
                self._program(
                    Work(kind, self.s),  # type: ignore[arg-type]
                    _Source(loop.body, loop.prefix, literal, loop.number),
                    ops,
                    [*wanted, *residuals],
                    sums,
                    ports,
                )
            )
            passed.update((str(v), p) for v, p in residuals)
        return programs

    @staticmethod
    def _reads(graph: Graph, ids: set[str]) -> set[str]:
        return {o for op in graph.operators if op.id in ids for o in op.reads}

    @staticmethod
    def _made_in(x: Leaving, maker: dict[str, str]) -> str:
        return maker.get(x.operand, "forward") if isinstance(x.operand, str) else "forward"

    def _total_ids(self, loop: Loop) -> set[str]:
        """Operators that only add a contribution to a total: accumulating is the schedule's."""
        ids = set()
        for o, x in zip(loop.graph.outputs, loop.leaving, strict=False):
            if x.reduce is not None and isinstance(o.operand, str) and o.operand != x.operand:
                ids.add(loop.graph.producers[o.operand].id)
        return ids

    # -- where examples meet, and the update --------------------------------------------------------------------------

    def _updates(self) -> list[StageProgram]:
        graph, loop = self.graph, self.loop
        early = self._early_ids(loop)
        loop_id = "" if loop is None else loop.op.id
        late = [op for op in graph.operators if op.id not in early and op.id != loop_id and not is_generator(op)]
        outputs = self._late_outputs()
        if not outputs:
            return []
        ports, received = self._late_sources(early)
        met = len(self.stage.parts.sent_met)
        moment_of_op = moments_of(graph, late, received, [o.operand for o, _ in outputs[len(outputs) - met :]])
        ends = moments_of_outputs(graph, moment_of_op, received, [o for o, _ in outputs], met)
        programs = []
        for moment in sorted({*moment_of_op.values(), *ends}):
            ids = {id for id, m in moment_of_op.items() if m == moment}
            later = {id for id, m in moment_of_op.items() if m > moment}
            wanted: list[tuple[Operand, Port]] = []
            for index, (o, layout) in enumerate(outputs):
                if ends[index] == moment:
                    there = o.updates in self.decisions.hosted
                    wanted.append((o.operand, Port(self._output_ref(index), o.type, layout, there)))
            read_later = self._reads(graph, later)
            read_later |= {str(o.operand) for n, (o, _) in enumerate(outputs) if ends[n] > moment}
            for op in late:
                if op.id in ids:
                    for v in op.results:
                        if v.name in read_later and v.name in self.layouts:
                            port = Port(self._own("mid", v.name), v.type, self.layouts[v.name])
                            wanted.append((v.name, port))
                            ports[v.name] = port
            for n, some in self._groups(moment.part, wanted, outputs):
                ops = needed_of(graph, [o for o, _ in some], ids)
                computed = {v.name for op in ops for v in op.results}
                program = self._program(
                    Work(moment.kind, self.s, n), _Source(self.stage.program), ops, some, [],
                    {n: p for n, p in ports.items() if n not in computed},
                )  # fmt: skip
                programs.append(program)
        return programs

    def _groups(
        self, number: int, wanted: list[tuple[Operand, Port]], outputs: Sequence[tuple[Output, Layout]]
    ) -> list[tuple[int, list[tuple[Operand, Port]]]]:
        """Part and results of the programs that a part of the update becomes."""
        if not self.separate_state:
            return [(number, wanted)]
        state = {self._output_ref(n) for n, (o, _) in enumerate(outputs) if o.updates is not None}
        groups = [[w for w in wanted if (w[1].ref in state) == replaces_state] for replaces_state in (True, False)]
        return [(n, some) for n, some in enumerate(groups) if some]

    def _output_ref(self, index: int) -> ValueRef:
        """Reference of an output of the stage's graph: an output of the step, or a value sent after the loop."""
        outputs, late = self.stage.parts.outputs, self.stage.parts.sent_late
        if index < len(outputs):
            return ValueRef("out", str(outputs[index]))
        at = index - len(outputs)
        return (
            ValueRef("late", late[at]) if at < len(late) else ValueRef("met", self.stage.parts.sent_met[at - len(late)])
        )

    def _late_sources(self, early: set[str]) -> tuple[dict[str, Port], dict[str, Moment]]:
        """Ports of what is taken from elsewhere once, and the moment from which on what others send is there."""
        ports = {i.name: self._input(i.name) for i in self.graph.inputs}
        part = {str(StageValue("late", r.name)): Moment("update", r.part) for r in self.stage.parts.received_late}
        part |= {str(StageValue("met", r.name)): Moment("meeting", r.part) for r in self.stage.parts.received_met}
        for op in self.graph.operators:
            if op.id in early and not is_generator(op):
                for v in op.results:
                    ports[v.name] = Port(self._own("early", v.name), v.type, self.layouts[v.name])
        if self.loop is not None:
            for v, x in self._loop_results(self.loop):
                if x.reduce is not None:
                    # Between programs the total lies as its contributions do.
                    rows = x.reduce == "concatenate"
                    layout = x.layout.stack() if rows else x.layout
                    ports[v.name] = Port(self._own("sum", x.name), v.type, layout, stacked=rows)
        return ports, part

    @staticmethod
    def _loop_results(loop: Loop) -> list[tuple[Any, Leaving]]:
        return list(zip(loop.op.results, loop.leaving, strict=True))

    # -- programs ------------------------------------------------------------------------------

    def _program(
        self,
        work: Work,
        source: _Source,
        ops: Sequence[Operator],
        wanted: Sequence[tuple[Operand, Port]],
        sums: Sequence[tuple[Operand, Port, str]],
        ports: dict[str, Port],
    ) -> StageProgram:
        computed = {v.name for op in ops for v in op.results}
        asked: list[tuple[Operand, Port]] = [*wanted, *((o, p) for o, p, _ in sums)]
        read = {o for op in ops for o in op.reads} | {o for o, _ in asked if isinstance(o, str)}
        taken = {n: p for n, p in ports.items() if n in read and n not in computed}
        # State comes in the order of what replaces it: a compiler gives buffers to results of their kind in order.
        replaced = {o.operand: o.updates for o in source.bound.graph.outputs}
        partners = [str(o) if o in taken else replaced.get(o) for o, _ in asked]
        taken = {n: taken[n] for n in dict.fromkeys([*(n for n in partners if n in taken), *taken])}
        fixed = {n: v for n, v in source.literals.items() if n in read}
        counted = [source.number] if source.number in read else []
        inputs = [
            *(Input(n, TensorType((), "i32")) for n in counted),
            *(Input(n, v.type) for n, v in fixed.items()),
            *(Input(n, p.type, "activation" if p.ref.kind in _PASSED_ON else "other") for n, p in taken.items()),
        ]
        layouts = [
            *(Layout.replicated(0) for _ in counted),
            *(Layout.replicated(0) for _ in fixed),
            *(p.layout for p in taken.values()),
        ]
        written = {o: n for o, n in replaced.items() if source.prefix and n in taken}
        outputs = tuple(Output(o, p.name, p.type, written.get(o)) for o, p in asked)
        part = BoundGraph(
            Graph(str(work), tuple(inputs), tuple(ops), outputs), source.bound.bounds, source.bound.constants
        )
        decisions = self.decisions
        hosted = decisions.hosted | {source.prefix + n for n, p in taken.items() if p.host}
        constants = [scalar(v) for v in fixed.values()]

        def on_device(microbatch: Any, microbatch_inputs: Sequence[Any], index: AxisIndex) -> list[Any]:
            given = [*([microbatch] if counted else []), *constants, *microbatch_inputs]
            interpreter = Interpreter(replace(decisions, index=index, hosted=hosted), source.prefix)
            return interpreter.run(part, given, layouts, [p.layout for _, p in asked])

        return StageProgram(
            work,
            tuple(taken.values()),
            tuple(p for _, p in wanted),
            tuple((p, reduce) for _, p, reduce in sums),
            on_device,
        )


@dataclass(frozen=True, order=True)
class Moment:
    """A program that runs once a step, once the passes before it are done; later ones are larger.

    Args:
        kind: "meeting" between all forward and all backward passes, "update" after all of them.
        part: counts up where values cross stages.
    """

    kind: _MomentKind
    part: int


def moments_of(
    graph: Graph, late: Sequence[Operator], received: Mapping[str, Moment], met: Sequence[Operand]
) -> dict[str, Moment]:
    """Moments at which operators run, by id.

    Args:
        graph: of the stage.
        late: its operators that run once, after some passes.
        received: by input from when on it is there.
        met: outputs that are made where examples meet.
    """
    meeting = {op.id for op in needed_of(graph, met, {op.id for op in late})}
    moments: dict[str, Moment] = {}
    there = dict(received)
    for op in late:
        kind: _MomentKind = "meeting" if op.id in meeting else "update"
        parts = [there[o].part for o in op.reads if o in there and there[o].kind == kind]
        moments[op.id] = Moment(kind, max(parts, default=0))
        there.update((v.name, moments[op.id]) for v in op.results)
    return moments


def moments_of_outputs(
    graph: Graph,
    moments: Mapping[str, Moment],
    received: Mapping[str, Moment],
    outputs: Sequence[Output],
    met: int,
) -> list[Moment]:
    """Moments of the outputs of a stage, of which the last ``met`` are made where examples meet."""
    ends = []
    for n, o in enumerate(outputs):
        op = graph.producers.get(o.operand) if isinstance(o.operand, str) else None
        start = Moment("meeting" if n >= len(outputs) - met else "update", 0)
        ends.append(received.get(str(o.operand), start) if op is None else moments.get(op.id, start))
    return ends
