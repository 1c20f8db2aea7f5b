"""What the search minimizes, written a second time from its documentation alone: slow, simple, no graph of nodes.

A program is a list of choices and of costs that depend on one or two of them:

    an input        in which layout it lies; with several readers also a coarser copy, gathered once
    an operator     one of the strategies of its rule, unless a layout of an operand decides it
    a value         with several readers the layout of the copy that they share
    a loop          the layout of each constant, carry, slice and stack
    cost            roofline seconds of each operator, seconds of the resharding path of each conversion, times trips

`least_seconds` is the least total. It shares with the planner the rules, the resharding paths and the cost model.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel, operator_bytes, operator_flops
from autopar.ir import Graph, Layout, Literal, Operator, TensorType
from autopar.ir.primitives import is_fusible, is_generator, is_zero
from autopar.search.resharding import path_tables
from autopar.sharding import Strategy, rule_for, strategies
from autopar.sharding.reshard import PathTables

Layouts = Sequence[Layout]
Term = tuple[tuple[str, ...], np.ndarray]

# These gain nothing from partial operands: every device would do the whole work for its term.
HEAVY = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "gather"}


def least(terms: Sequence[Term]) -> float:
    """The least sum of terms over all choices; each is an array over the choices that it names.

    Choices are minimized away one at a time, that of the smallest table first.
    """
    left = list(terms)
    total = 0.0
    while True:
        sizes = {v: n for names, table in left for v, n in zip(names, table.shape, strict=True)}
        if not sizes:
            return total + math.fsum(float(table) for _, table in left)
        around = {v: sorted({u for names, _ in left if v in names for u in names} - {v}) for v in sizes}
        v = min(sizes, key=lambda v: (sizes[v] * math.prod(sizes[u] for u in around[v]), v))
        scope = (v, *around[v])
        table = np.zeros([sizes[u] for u in scope])
        for names, costs in (t for t in left if v in t[0]):
            order = sorted(range(len(names)), key=lambda i: scope.index(names[i]))
            shape = [sizes[u] if u in names else 1 for u in scope]
            table = table + costs.transpose(order).reshape(shape)
        left = [t for t in left if v not in t[0]] + [(scope[1:], table.min(axis=0))]


def least_by_trying(terms: Sequence[Term]) -> float:
    """`least`, by trying every combination."""
    sizes = {v: n for names, table in terms for v, n in zip(names, table.shape, strict=True)}
    every = itertools.product(*(range(n) for n in sizes.values()))
    at = (dict(zip(sizes, c, strict=True)) for c in every)
    return min(math.fsum(float(t[tuple(c[v] for v in names)]) for names, t in terms) for c in at)


@dataclass(eq=False)
class Paths:
    """Seconds of resharding on one mesh, remembered."""

    tables: PathTables
    known: dict[tuple[TensorType, Layout, Layout], float] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=8)
    def of(mesh: LogicalMesh, cost: CostModel) -> Paths:
        return Paths(path_tables(mesh, cost))

    def seconds(self, type: TensorType, source: Layout, target: Layout) -> float:
        key = (type, source, target)
        if key not in self.known:
            self.known[key] = self.tables.seconds(*key)
        return self.known[key]


@dataclass
class Reader:
    """Takes a value in ``layouts``, by what ``choice`` chooses."""

    choice: str
    layouts: Layouts
    weight: float
    slices: bool = False


@dataclass
class Held:
    """A value: the choice that decides its layout, and the layout by that choice; none if it is made on demand."""

    type: TensorType
    choice: str | None
    layouts: Layouts
    weight: float
    time: int = 0
    argument: bool = False
    fused: bool = False
    zero: bool = False
    copies: Layouts = ()  # of an argument: the layout of its copy by its choice
    takers: int = 0  # operators that take it, and whether it is returned
    readers: list[Reader] = field(default_factory=list)


class Meaning:
    """Collects the choices and costs of a graph on a mesh.

    Args:
        mesh: the logical mesh.
        cost: what things cost.
        follow: whether operators whose strategy one operand's layout decides have no choice of their own.
    """

    def __init__(self, mesh: LogicalMesh, cost: CostModel, follow: bool = True) -> None:
        self.mesh, self.cost, self.follow = mesh, cost, follow
        self.paths = Paths.of(mesh, cost)
        self.terms: list[Term] = []
        self.held: list[Held] = []
        self.time = 0

    # -- layouts -----------------------------------------------------------------------------------

    def layouts(self, type: TensorType, partial: bool = False) -> list[Layout]:
        """Every layout: each axis splits a dim that it divides, or none, or is summed over."""
        if type.dtype.startswith("key<") or type.size == 0:
            return [Layout.replicated(type.rank)]
        axes = [(a, n) for a, n in self.mesh.axes if n > 1]
        found = []
        for places in itertools.product(range(-1, type.rank + partial), repeat=len(axes)):
            dims = tuple(tuple(a for (a, _), p in zip(axes, places, strict=True) if p == d) for d in range(type.rank))
            layout = Layout(dims, tuple(a for (a, _), p in zip(axes, places, strict=True) if p == type.rank))
            if layout.fits(type.shape, self.mesh.sizes):
                found.append(layout)
        return found

    def seconds(self, type: TensorType, sources: Layouts, targets: Layouts) -> np.ndarray:
        return np.array([[self.paths.seconds(type, a, b) for b in targets] for a in sources])

    # -- choices -----------------------------------------------------------------------------------

    def choose(self, name: str, costs: Any) -> str:
        self.terms.append(((name,), np.asarray(costs, float)))
        return name

    def add(self, first: str, second: str, costs: np.ndarray) -> None:
        if first == second:
            self.terms.append(((first,), np.diagonal(costs)))
        else:
            self.terms.append(((first, second), costs))

    def value(self, type: TensorType, choice: str | None, layouts: Layouts, weight: float, **rest: Any) -> Held:
        found = Held(type, choice, tuple(layouts), weight, self.time, **rest)
        self.held.append(found)
        return found

    # -- programs ----------------------------------------------------------------------------------

    def program(self, graph: Graph) -> float:
        """Least seconds of a step."""
        reading = Counter(o for op in graph.operators for o in set(op.operands) if isinstance(o, str))
        stacks = {o for op in graph.operators if op.primitive == "scan" for o in op.operands}
        env: dict[str, Held] = {}
        for i in graph.inputs:
            plain = self.layouts(i.type)
            pairs = [(a, a) for a in plain]
            if reading[i.name] > 1 or i.name in stacks:
                pairs = [(a, b) for a in plain for b in plain if _coarser(a, b)]
            gathers = [self.paths.seconds(i.type, a, b) for a, b in pairs]
            choice = self.choose(f"input {i.name}", gathers)
            env[i.name] = self.value(i.type, choice, [a for a, _ in pairs], 1.0, argument=True)
            env[i.name].copies = [b for _, b in pairs]
        self.body(graph, env, "", 1.0)
        for o in graph.outputs:
            if isinstance(o.operand, Literal) or env[o.operand].choice is None:
                continue
            if o.updates is None:
                layouts: Layouts = self.layouts(o.type)
                choice = self.choose(f"output {o.path}", [0.0] * len(layouts))
            else:
                layouts, choice = env[o.updates].layouts, str(env[o.updates].choice)
            env[o.operand].readers.append(Reader(choice, tuple(layouts), 1.0))
        for number, held in enumerate(self.held):
            self.conversions(held, f"copy {number}")
        return least(self.terms)

    def body(self, graph: Graph, env: dict[str, Held], prefix: str, weight: float) -> None:
        readers: dict[str, list[Operator]] = {}
        for op in graph.operators:
            for o in op.operands:
                if isinstance(o, str):
                    readers.setdefault(o, []).append(op)
        returned = {o.operand for o in graph.outputs}
        takers = {name: len({op.id for op in ops}) + (name in returned) for name, ops in readers.items()}
        for op in graph.operators:
            self.time += 1
            for o in op.operands:
                if isinstance(o, str):
                    env[o].takers = takers[o]
            if op.primitive == "scan":
                self.scan(op, env, prefix, weight)
            elif op.primitive == "cond":
                self.cond(graph, op, env, prefix, weight)
            elif op.regions or op.primitive == "optimization_barrier":
                raise NotImplementedError(op.primitive)
            elif is_generator(op):
                env[op.results[0].name] = self.value(op.results[0].type, None, (), weight, zero=is_zero(op))
            else:
                fused = is_fusible(op) and all(
                    v.name not in returned and len(r := readers.get(v.name, [])) == 1 and is_fusible(r[0])
                    for v in op.results
                )
                self.operator(graph, op, env, prefix, weight, fused)

    def operator(
        self, graph: Graph, op: Operator, env: dict[str, Held], prefix: str, weight: float, fused: bool
    ) -> None:
        types = graph.operand_types(op)
        sources = [None if isinstance(o, Literal) else env[o] for o in op.operands]
        allowed = self.strategies(op, types, sources)
        moved = operator_bytes(op, types)
        if is_fusible(op):  # one kernel with its neighbours: what is fused away is neither written nor read
            there = [s for s in sources if s is not None and s.choice is not None and not s.fused]
            moved = sum(s.type.nbytes for s in there) + (0 if fused else sum(v.type.nbytes for v in op.results))
        dtype = types[0].dtype if types else op.results[0].type.dtype
        flops = operator_flops(op, types)
        choice, allowed = self.decided(op, sources, allowed, prefix + op.id)
        busy = [self.cost.operator_s(flops / s.split, moved / s.split, dtype) * weight for s in allowed]
        self.choose(choice, busy)
        for n, source in enumerate(sources):
            layouts = tuple(s.operand_layouts[n] for s in allowed)
            if source is not None and source.choice is not None:
                source.readers.append(Reader(choice, layouts, weight))
        for n, v in enumerate(op.results):
            env[v.name] = self.value(v.type, choice, [s.result_layouts[n] for s in allowed], weight, fused=fused)

    def strategies(self, op: Operator, types: tuple[TensorType, ...], sources: Sequence[Held | None]) -> list[Strategy]:
        """Those of the rule that make sense: no number and nothing made on demand is a term of a sum unless it is 0."""
        rule, _ = rule_for(op, types)
        every = strategies(rule, types, tuple(v.type for v in op.results), self.mesh)
        free = [s is None or s.choice is None for s in sources]
        zero = [
            o.is_zero if isinstance(o, Literal) else s is not None and s.zero
            for o, s in zip(op.operands, sources, strict=True)
        ]
        found = []
        for s in every:
            partial = [bool(k.partial) for k in s.operand_layouts]
            linear = any(a.group is not None for a in s.assignments)
            made_term = any(p and f and not z for p, f, z in zip(partial, free, zero, strict=True))
            real_term = any(p and not f for p, f in zip(partial, free, strict=True))
            if not made_term and (not linear or (real_term and op.primitive not in HEAVY)):
                found.append(s)
        found = found or [every[0]]
        scalar_sum = op.primitive in ("add", "add_any", "sub") and not any(v.type.rank for v in op.results)
        if scalar_sum and any(k.partial for s in sources if s is not None for k in s.layouts):
            found = [s for s in found if all(a.group is not None for a in s.assignments)] or found
        return found

    def decided(
        self, op: Operator, sources: Sequence[Held | None], allowed: list[Strategy], name: str
    ) -> tuple[str, list[Strategy]]:
        """The choice that decides the operator's strategy, and its strategy by that choice."""
        held = [(n, s) for n, s in enumerate(sources) if s is not None and s.choice is not None]
        made = [(n, s) for n, s in held if not s.argument]
        if not self.follow or not made:
            return name, allowed
        _, leader = max(made, key=lambda e: (e[1].type.rank, e[1].time, -e[0]))
        alone = all(s.choice == leader.choice for _, s in held) and leader.takers == 1
        if not alone and any(k.partial for k in leader.layouts):
            return name, allowed
        same = [i for i, s in held if s is leader]
        fitting = [[s for s in allowed if all(s.operand_layouts[i] == k for i in same)] for k in leader.layouts]
        if any(len(f) != 1 for f in fitting):
            return name, allowed
        return str(leader.choice), [f[0] for f in fitting]

    # -- loops and branches --------------------------------------------------------------------------

    def enter(
        self, operand: str | Literal, env: dict[str, Held], choice: str, layouts: Layouts, weight: float,
        slices: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(operand, str) and env[operand].choice is not None:
            env[operand].readers.append(Reader(choice, tuple(layouts), weight, slices))

    def scan(self, op: Operator, env: dict[str, Held], prefix: str, weight: float) -> None:
        body, trips = op.region("body"), op.integer("length")
        constants, carries = op.integer("num_consts"), op.integer("num_carry")
        begin, inside = self.time, weight * trips
        inner: dict[str, Held] = {}
        carried: list[tuple[str, list[Layout]]] = []
        for n, (operand, entry) in enumerate(zip(op.operands, body.inputs, strict=True)):
            is_carry = constants <= n < constants + carries
            layouts = self.layouts(entry.type, partial=is_carry and _summable(entry.type))
            choice = self.choose(f"{prefix}{op.id}/{entry.name}", [0.0] * len(layouts))
            inner[entry.name] = self.value(entry.type, choice, layouts, inside)
            slices = n >= constants + carries
            self.enter(operand, env, choice, [_stacked(k) for k in layouts] if slices else layouts, weight, slices)
            if is_carry:
                carried.append((choice, layouts))
        self.body(body, inner, f"{prefix}{op.id}/", inside)
        self.time += 1
        for n, result in enumerate(op.results):
            if n < carries:
                choice, layouts = carried[n]
                outer = layouts
            else:
                type = body.outputs[n].type
                layouts = self.layouts(type, partial=_summable(type))
                choice = self.choose(f"{prefix}{result.name}", [0.0] * len(layouts))
                outer = [_stacked(k) for k in layouts]
            self.enter(body.outputs[n].operand, inner, choice, layouts, inside)
            env[result.name] = self.value(result.type, choice, outer, weight)
            env[result.name].time = begin

    def cond(self, graph: Graph, op: Operator, env: dict[str, Held], prefix: str, weight: float) -> None:
        share = weight / len(op.regions)
        index = graph.type_of(op.operands[0])
        whole = self.choose(f"{prefix}{op.id} index", [0.0])
        self.enter(op.operands[0], env, whole, [Layout.replicated(index.rank)], weight)
        ports = []
        for n, operand in enumerate(op.operands[1:]):
            layouts = self.layouts(graph.type_of(operand))
            choice = self.choose(f"{prefix}{op.id} operand {n}", [0.0] * len(layouts))
            self.enter(operand, env, choice, layouts, weight)
            ports.append((choice, layouts))
        ends: list[dict[str, Held]] = []
        for name, branch in op.regions:
            inner = {
                entry.name: self.value(entry.type, choice, layouts, share)
                for entry, (choice, layouts) in zip(branch.inputs, ports, strict=True)
            }
            self.body(branch, inner, f"{prefix}{op.id}/{name}/", share)
            ends.append(inner)
        self.time += 1
        for n, result in enumerate(op.results):
            layouts = self.layouts(result.type)
            choice = self.choose(f"{prefix}{result.name}", [0.0] * len(layouts))
            for inner, (_, branch) in zip(ends, op.regions, strict=True):
                self.enter(branch.outputs[n].operand, inner, choice, layouts, share)
            env[result.name] = self.value(result.type, choice, layouts, weight)

    # -- conversions -------------------------------------------------------------------------------

    def conversions(self, held: Held, name: str) -> None:
        if held.choice is None:
            return
        by_choice: dict[str, list[Reader]] = {}
        for r in held.readers:
            by_choice.setdefault(r.choice, []).append(r)
        at_home = by_choice.pop(held.choice, [])
        if at_home:
            self.take(held, held.choice, held.layouts, at_home)
        if held.argument:
            for readers in by_choice.values():
                for slices in (False, True):
                    self.take(held, held.choice, held.layouts, [r for r in readers if r.slices == slices])
        elif len(by_choice) < 2:
            for readers in by_choice.values():
                self.take(held, held.choice, held.layouts, readers)
        else:
            kinds = sorted({*held.layouts, *(k for readers in by_choice.values() for r in readers for k in r.layouts)})
            copy = self.choose(name, [0.0] * len(kinds))
            self.add(held.choice, copy, self.seconds(held.type, held.layouts, kinds) * held.weight)
            for readers in by_choice.values():
                self.take(held, copy, kinds, readers)

    def take(self, held: Held, source: str, layouts: Layouts, readers: Sequence[Reader]) -> None:
        """What readers of one choice pay: a conversion for each different layout that they want."""
        if not readers:
            return
        rows = []
        for k, layout in enumerate(layouts):
            row = []
            for wanted in zip(*(r.layouts for r in readers), strict=True):
                at = dict.fromkeys(wanted)
                row.append(readers[0].weight * sum(self.conversion(held, k, layout, w, readers[0]) for w in at))
            rows.append(row)
        self.add(source, readers[0].choice, np.array(rows))

    def conversion(self, held: Held, k: int, layout: Layout, wanted: Layout, reader: Reader) -> float:
        """Seconds of taking a value in ``wanted`` that lies in ``layout``, the k-th choice of where it lies."""
        direct = self.paths.seconds(held.type, layout, wanted)
        if not held.argument:
            return direct
        if reader.choice == held.choice:
            return direct
        if reader.slices and wanted not in (layout, held.copies[k]):
            return math.inf  # a loop takes slices of what is there
        return min(direct, self.paths.seconds(held.type, held.copies[k], wanted))


def least_seconds(graph: Graph, mesh: LogicalMesh, cost: CostModel, follow: bool = True) -> float:
    """Least seconds of a step of ``graph`` on ``mesh``, memory aside. See `Meaning`."""
    return Meaning(mesh, cost, follow).program(graph)


def _summable(type: TensorType) -> bool:
    return type.dtype != "bool" and not type.dtype.startswith("key<") and type.size > 0


def _stacked(layout: Layout) -> Layout:
    return Layout(((), *layout.dims), layout.partial, layout.reduce)


def _coarser(a: Layout, b: Layout) -> bool:
    """Whether gathering some axes of ``a`` leads to ``b``."""
    return all(tuple(x for x in da if x in db) == db for da, db in zip(a.dims, b.dims, strict=True))
