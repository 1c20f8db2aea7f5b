"""Proves that a plan computes what its program says, or names the first entry that is wrong.

`verify_plan` is what callers start with. A plan is right if

- each layout fits its type and its mesh, and arguments and results are no partial sums,
- each operator's layouts are those of a strategy that its sharding rule allows,
- carries keep their layout, loops run over whole stacks, and the conditions of loops and branches are whole,
- steps of resharding lead from the layout in which a value is made, or copied, to each in which it is read.

Seconds, bytes and notes are not looked at: nothing is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir import Graph, Layout, Literal, Operand, Operator, TensorType
from autopar.ir.blockwise import ATTENTION, BACKWARD, AttentionSpec
from autopar.ir.loops import Scan, While
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_generator, wire_of
from autopar.plan import InputRecord, OperatorRecord, OutputRecord, PlanContent
from autopar.sharding.registry import rule_for
from autopar.sharding.reshard import PathTables
from autopar.sharding.routes import Routes
from autopar.sharding.strategies import strategy_of

_PHASES = ("", "forward", "backward", "update")
_REDUCTIONS = ("sum", "max", "min", "and", "or")


def verify_plan(graph: Graph, content: PlanContent, tables: PathTables, at: str = "plan") -> None:
    """Raises PlanMismatchError, with the path of the first wrong entry, unless a plan of one stage is right.

    Args:
        graph: the program, in the form that the plan is of.
        content: of the plan, or of one stage of a pipeline.
        tables: resharding paths of its mesh.
        at: path of ``content`` in the plan.
    """
    _Verifier(graph, content, tables, at).run()


def verify_arguments(graph: Graph, content: PlanContent) -> None:
    """Raises PlanMismatchError unless a plan of several stages says right how arguments and results lie.

    Args:
        graph: the program.
        content: of the plan.
    """
    for n, o in enumerate(graph.outputs):
        if n < len(content.outputs) and content.outputs[n].updates != o.updates:
            raise wrong_entry(f"plan.outputs[{n}].updates", f"{o.path} replaces {o.updates}")
    ports: list[tuple[str, Sequence[InputRecord | OutputRecord], list[tuple[str, TensorType]]]] = [
        ("inputs", content.inputs, [(i.name, i.type) for i in graph.inputs]),
        ("outputs", content.outputs, [(o.path, o.type) for o in graph.outputs]),
    ]
    for name, records, there in ports:
        if len(records) != len(there):
            raise wrong_entry(f"plan.{name}", f"there are {len(there)}, not {len(records)}")
        for n, (record, (path, type)) in enumerate(zip(records, there, strict=True)):
            at = f"plan.{name}[{n}]"
            if record.path != path:
                raise wrong_entry(f"{at}.path", f"this is {path!r}")
            if record.type != str(type):
                raise wrong_entry(f"{at}.type", f"{path} is {type}")
            if not 0 <= record.stage < len(content.stages):
                raise wrong_entry(f"{at}.stage", f"there are {len(content.stages)} stages")
            sizes = content.stages[record.stage].mesh_shape
            if checked_layout(record.layout, type, sizes, f"{at}.layout").partial:
                raise wrong_entry(f"{at}.layout", f"{path} is no partial result")


def checked_layout(text: str, type: TensorType, sizes: Mapping[str, int], path: str) -> Layout:
    """The layout that an entry of a plan says.

    Args:
        text: the entry.
        type: of the value that lies so.
        sizes: of the axes of its mesh.
        path: of the entry.

    Raises:
        PlanMismatchError: it is no layout of this type on this mesh.
    """
    try:
        layout = Layout.parse(text)
    except ValueError as error:
        raise wrong_entry(path, str(error)) from error
    names = (*layout.axes, *layout.partial)
    unknown = [a for a in names if a not in sizes]
    if unknown:
        raise wrong_entry(path, f"{text} names {unknown[0]!r}; the mesh has {', '.join(sizes)}")
    if len(set(names)) != len(names):
        raise wrong_entry(path, f"{text} names an axis twice")
    if layout.reduce not in _REDUCTIONS:
        raise wrong_entry(path, f"{text} is partial in {layout.reduce!r}; reductions are {', '.join(_REDUCTIONS)}")
    if not layout.fits(type.shape, sizes):
        raise wrong_entry(path, f"{text} does not divide {type} on a mesh of {dict(sizes)}")
    return layout


def wrong_entry(path: str, fault: str) -> PlanMismatchError:
    """The error of a plan whose entry at ``path`` is wrong."""
    return PlanMismatchError(
        f"the plan is wrong at {path}: {fault}",
        cause="the file was changed by hand, or damaged",
        remedy="plan again, or undo the change",
    )


@dataclass
class _Value:
    """A value: in which layouts it exists; None where each device makes it in the layout that a reader asks for."""

    type: TensorType
    routes: Routes | None


_Env = dict[str, _Value]


@dataclass
class _Verifier:
    """Walks the program as the lowering does; arguments as of `verify_plan`."""

    graph: Graph
    content: PlanContent
    tables: PathTables
    at: str
    records: dict[str, tuple[str, OperatorRecord]] = field(default_factory=dict)
    copies: dict[str, dict[str, tuple[str, Layout]]] = field(default_factory=dict)

    def run(self) -> None:
        self._mesh()
        arguments, results = self.graph.inputs, self.graph.outputs
        self._count("inputs", self.content.inputs, arguments)
        self._count("outputs", self.content.outputs, results)
        inputs = [
            self._port(f"inputs[{n}]", record, i.name, i.type)
            for n, (record, i) in enumerate(zip(self.content.inputs, arguments, strict=True))
        ]
        outputs = []
        for n, (result, o) in enumerate(zip(self.content.outputs, results, strict=True)):
            outputs.append(self._port(f"outputs[{n}]", result, o.path, o.type))
            if result.updates != o.updates:
                raise self._wrong(f"outputs[{n}].updates", f"{o.path} replaces {o.updates}")
        names = {i.name for i in self.graph.inputs}
        for n, name in enumerate(self.content.donated):
            if name not in names:
                raise self._wrong(f"donated[{n}]", f"{name!r} is no argument")
        self._index()
        self._graph(self.graph, "", inputs, [(k, f"outputs[{n}].layout") for n, k in enumerate(outputs)], "update")
        for id, (path, _) in self.records.items():
            raise self._wrong(path, f"there is no operator {id!r} that has a layout")
        for value, phases in self.copies.items():
            raise self._wrong(next(iter(phases.values()))[0], f"there is no value {value!r} that has a layout")

    # -- entries ---------------------------------------------------------------------------------

    def _mesh(self) -> None:
        if len(self.content.stages) != 1:
            raise self._wrong("stages", f"there is one, not {len(self.content.stages)}")
        (stage,) = self.content.stages
        if stage.mesh_axes != self.tables.mesh.axes:
            raise self._wrong("stages[0].mesh_axes", f"on this cluster they are {self.tables.mesh.axes}")

    def _count(self, name: str, records: Sequence[object], there: Sequence[object]) -> None:
        if len(records) != len(there):
            raise self._wrong(name, f"there are {len(there)}, not {len(records)}")

    def _port(self, at: str, record: InputRecord | OutputRecord, path: str, type: TensorType) -> Layout:
        """The layout of an argument or result."""
        if record.path != path:
            raise self._wrong(f"{at}.path", f"this is {path!r}")
        if record.type != str(type):
            raise self._wrong(f"{at}.type", f"{path} is {type}")
        if record.stage != 0:
            raise self._wrong(f"{at}.stage", "there is one stage")
        layout = self._layout(record.layout, type, f"{at}.layout")
        if layout.partial:
            raise self._wrong(f"{at}.layout", f"{path} is no partial result")
        return layout

    def _layout(self, text: str, type: TensorType, path: str) -> Layout:
        """The layout that a text is of a type."""
        return checked_layout(text, type, self.tables.mesh.sizes, f"{self.at}.{path}")

    def _index(self) -> None:
        for n, record in enumerate(self.content.operators):
            if record.id in self.records:
                raise self._wrong(f"operators[{n}].id", f"{record.id!r} was there before")
            if record.stage != 0:
                raise self._wrong(f"operators[{n}].stage", "there is one stage")
            self.records[record.id] = f"operators[{n}]", record
        for n, copy in enumerate(self.content.copies):
            if copy.phase not in _PHASES:
                raise self._wrong(f"copies[{n}].phase", f"phases are {', '.join(map(repr, _PHASES))}")
            phases = self.copies.setdefault(copy.value, {})
            if copy.phase in phases:
                raise self._wrong(f"copies[{n}]", f"{copy.value} has such a copy already")
            try:
                phases[copy.phase] = f"copies[{n}].layout", Layout.parse(copy.layout)
            except ValueError as error:
                raise self._wrong(f"copies[{n}].layout", str(error)) from error

    # -- values ----------------------------------------------------------------------------------

    def _made(self, key: str, type: TensorType, layout: Layout, tables: PathTables | None = None) -> _Value:
        """A value that is made in a layout; ``key`` is its name with the regions around it."""
        copies = self.copies.pop(key, {})
        layouts = {phase: self._layout(str(k), type, path) for phase, (path, k) in copies.items()}
        routes = Routes(tables or self.tables, type, layout, layouts, self.content.memory_bound)
        for phase, (path, _) in copies.items():
            self._converts(routes.tables, type, layout, layouts[phase], path)
        return _Value(type, routes)

    def _read(
        self, env: _Env, operand: Operand, type: TensorType, layout: Layout | None, phase: str, path: str
    ) -> Layout:
        """The layout in which an operand is taken, once it is sure that it can be."""
        wanted = layout or Layout.replicated(type.rank)
        value = None if isinstance(operand, Literal) else env[operand]
        if value is None or value.routes is None:
            if wanted.partial and (wanted.reduce != "sum" or type.dtype == "bool" or type.dtype.startswith("key<")):
                raise self._wrong(path, f"{wanted} is not a layout of a number that every device has")
            return wanted
        for (_, source), (_, target) in value.routes.take(wanted, phase):
            self._converts(value.routes.tables, type, source, target, path)
        return wanted

    def _converts(self, tables: PathTables, type: TensorType, source: Layout, target: Layout, path: str) -> None:
        try:
            tables.path(type, source, target)
        except AutoparError as error:
            raise self._wrong(path, f"no resharding leads from {source} to {target} of {type}") from error

    # -- operators -------------------------------------------------------------------------------

    def _graph(
        self, graph: Graph, prefix: str, layouts: Sequence[Layout], wanted: Sequence[tuple[Layout, str]], phase: str
    ) -> None:
        """A graph, or a region: ``layouts`` of its inputs, of its outputs those that are wanted, with their paths."""
        env = {i.name: self._made(prefix + i.name, i.type, k) for i, k in zip(graph.inputs, layouts, strict=True)}
        for op in graph.operators:
            here = phase_of(op, phase)
            if is_generator(op):
                env.update((v.name, _Value(v.type, None)) for v in op.results)
            elif op.primitive in ALIASES:
                self._alias(op, prefix, env)
            else:
                path, record = self.records.pop(prefix + op.id, ("", None))
                if record is None:
                    raise self._wrong("operators", f"nothing says how {prefix + op.id} is split")
                _Operation(self, graph, op, prefix, env, here, path, record).run()
        last = phase if prefix else "update"
        for o, (layout, path) in zip(graph.outputs, wanted, strict=True):
            self._read(env, o.operand, o.type, layout, last, path)

    def _alias(self, op: Operator, prefix: str, env: _Env) -> None:
        wire = wire_of(op)
        for operand, result in zip(op.operands, op.results, strict=True):
            source = None if isinstance(operand, Literal) else env[operand]
            if source is None or source.routes is None:
                env[result.name] = _Value(result.type, None)
            else:
                tables = self.tables.sending(wire) if wire else None
                env[result.name] = self._made(prefix + result.name, result.type, source.routes.layout, tables)

    def _wrong(self, path: str, fault: str) -> PlanMismatchError:
        return wrong_entry(f"{self.at}.{path}", fault)


@dataclass
class _Operation:
    """An operator with its record.

    Args:
        plan: the verifier.
        graph: that the operator is in.
        op: the operator.
        prefix: names of the regions around.
        env: values so far.
        phase: of the operator.
        path: of its record.
        record: what the plan says of it.
    """

    plan: _Verifier
    graph: Graph
    op: Operator
    prefix: str
    env: _Env
    phase: str
    path: str
    record: OperatorRecord

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Types of its operands."""
        return self.graph.operand_types(self.op)

    def run(self) -> None:
        """Checks the record, and adds the results to the values."""
        op, record = self.op, self.record
        if len(record.operands) != len(op.operands):
            raise self._wrong(".operands", f"{op.id} has {len(op.operands)}, not {len(record.operands)}")
        if len(record.results) != len(op.results):
            raise self._wrong(".results", f"{op.id} has {len(op.results)}, not {len(record.results)}")
        operands = [
            None if not text else self.plan._layout(text, t, f"{self.path}.operands[{n}]")
            for n, (text, t) in enumerate(zip(record.operands, self.types, strict=True))
        ]
        results = [
            self.plan._layout(text, v.type, f"{self.path}.results[{n}]")
            for n, (text, v) in enumerate(zip(record.results, op.results, strict=True))
        ]
        taken = [
            self.plan._read(self.env, o, t, k, self.phase, f"{self.path}.operands[{n}]")
            for n, (o, t, k) in enumerate(zip(op.operands, self.types, operands, strict=True))
        ]
        regions: Mapping[str, Callable[[Sequence[Layout], Sequence[Layout]], None]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }
        if op.regions and op.primitive in regions:
            regions[op.primitive](taken, results)
        else:
            self._strategy(operands, taken, results)
        self._places(taken)
        for v, layout in zip(op.results, results, strict=True):
            self.env[v.name] = self.plan._made(self.prefix + v.name, v.type, layout)

    def _strategy(self, given: Sequence[Layout | None], taken: Sequence[Layout], results: Sequence[Layout]) -> None:
        """The layouts are those of a strategy of the rule. A literal zero may be a term of any sum."""
        op = self.op
        rule, _ = rule_for(op, self.types)
        free = frozenset(
            n
            for n, (o, k) in enumerate(zip(op.operands, given, strict=True))
            if k is None and isinstance(o, Literal) and o.is_zero
        )
        mesh = self.plan.tables.mesh
        strategy = strategy_of(rule, self.types, tuple(v.type for v in op.results), mesh, taken, results, free)
        if strategy is None or (op.effects and any(a.factor is not None or a.group is not None for a in strategy)):
            lie = f"{', '.join(map(str, taken))} -> {', '.join(map(str, results))}"
            raise self._wrong("", f"no sharding rule of {op.primitive} allows {lie} for {op.id}")

    def _places(self, taken: Sequence[Layout]) -> None:
        """Layouts of results, and the form of the operator."""
        op, record = self.op, self.record
        is_scan = op.primitive == "scan" and not self.prefix
        first = Scan.of(op).num_carry if is_scan else len(op.results)
        for n, result in enumerate(record.host_results):
            if not first <= result < len(op.results) or result in record.host_results[:n]:
                raise self._wrong(f".host_results[{n}]", f"{result} is no stack of slices that {op.id} makes")
        if record.on_host and (self.prefix or op.regions):
            raise self._wrong(".on_host", f"{op.id} does not run on hosts")
        if record.skips_masked and not self._skips(taken):
            raise self._wrong(".skips_masked", f"{op.id} has no mask whose empty scores are left out in halves")
        if record.collective_matmul:
            numbers = {"lhs": 0, "rhs": 1}
            operand = op.operands[numbers[record.collective_matmul]] if record.collective_matmul in numbers else None
            source = self.env.get(operand) if isinstance(operand, str) else None
            held = record.collective_matmul == "result" or (source is not None and source.routes is not None)
            if op.primitive != "dot_general" or not held:
                raise self._wrong(".collective_matmul", f"{op.id} is no product of such blocks")

    def _skips(self, taken: Sequence[Layout]) -> bool:
        if self.op.primitive not in (ATTENTION, BACKWARD):
            return False
        sizes = self.plan.tables.mesh.sizes
        shapes = [k.local_shape(t.shape, sizes) for k, t in zip(taken, self.types, strict=True)]
        return AttentionSpec.of(self.op).has_halves(shapes)

    # -- regions ---------------------------------------------------------------------------------

    def _scan(self, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        loop = Scan.of(self.op)
        consts, carried, stacks = loop.split(operands)
        ends, stacked = loop.split_results(results)
        for n, layout in enumerate(stacks, loop.num_whole):
            if layout.dims[0]:
                raise self._wrong(f".operands[{n}]", "the loop goes over this dim, which is whole")
        for n, layout in enumerate(stacked, loop.num_carry):
            if layout.dims[0]:
                raise self._wrong(f".results[{n}]", "the loop goes over this dim, which is whole")
        self._carries(carried, ends)
        inner = [*consts, *carried, *(k.slice() for k in stacks)]
        self._region("body", inner, [*carried, *(k.slice() for k in stacked)])

    def _while(self, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        loop = While.of(self.op)
        in_cond, in_body, carried = loop.split(operands)
        self._carries(carried, results)
        predicate = loop.cond.outputs[0].type
        if predicate.rank:  # each of a batch stops by itself
            for n, layout in enumerate(carried, loop.num_consts):
                if not layout.is_replicated:
                    raise self._wrong(f".operands[{n}]", "a loop with several conditions carries whole values")
        self._region("cond", [*in_cond, *carried], [Layout.replicated(predicate.rank)])
        self._region("body", [*in_body, *carried], carried)

    def _cond(self, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        if not operands[0].is_replicated:
            raise self._wrong(".operands[0]", "every device needs the number of the branch")
        for name, _ in self.op.regions:
            self._region(name, operands[1:], results)

    def _carries(self, carried: Sequence[Layout], results: Sequence[Layout]) -> None:
        for n, (before, after) in enumerate(zip(carried, results, strict=True)):
            if before != after:
                raise self._wrong(f".results[{n}]", f"it is carried as {before}")

    def _region(self, name: str, layouts: Sequence[Layout], wanted: Sequence[Layout]) -> None:
        prefix = f"{self.prefix}{self.op.id}/{name}/"
        ends = [(k, f"{self.path}.results") for k in wanted]
        self.plan._graph(self.op.region(name), prefix, layouts, ends, self.phase)

    def _wrong(self, part: str, fault: str) -> PlanMismatchError:
        return self.plan._wrong(f"{self.path}{part}", fault)
