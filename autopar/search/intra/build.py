"""From a graph and a logical mesh to a `ChoiceProblem`.

Variables (nodes), each a choice of one strategy:
- an input: its layout, and where it lies (`.host`); if several operators read it, also a shared copy's (`add_input`);
- an operator: one of the strategies of its rule (`_operator`), unless each layout of one of its operands
  leaves it a single strategy: then it follows that operand and has no node of its own (`_followed`);
- a value with several readers: the layout of the copy that they share (`_connect`);
- what enters, is carried by and leaves a loop or a branch (`autopar.search.intra.regions`); a result.
Objective: the sum over nodes of seconds of work, and over edges of seconds of resharding from the layout in which a
value is made to the one in which it is read (`_connect`, `_connect_input`), times the trips of enclosing loops.
An output that replaces an input ends in that input's layout (`_outputs`). So an optimizer update is part
of the program, ZeRO-1/2/3 and FSDP are among its solutions. Bytes of live values are bounded at every time (`.memory`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.cost import Core, CostModel, Work
from autopar.ir import Graph, Layout, Literal, Operator, TensorType
from autopar.ir.attention import attention_cores, on_chip_operators
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ADDITIONS, RESHAPES, is_fusible, is_generator, is_zero, reads_fused
from autopar.search.constraints import Constraint
from autopar.search.intra.constrained import asked, constrained
from autopar.search.intra.draft import Array, CopyDraft, NodeDraft, RegionSite, SiteDraft, UsageDraft, Use, ValueDraft
from autopar.search.intra.fusion import growth_of, is_constant, is_recomputed
from autopar.search.intra.host import Offloading, add_host_seconds, offloading
from autopar.search.intra.labels import input_label, layout_label, strategy_label
from autopar.search.intra.layouts import LayoutTable
from autopar.search.intra.memory import local_bytes, usages
from autopar.search.intra.operators import OperatorOptions, OperatorTable
from autopar.search.intra.regions import REGIONS
from autopar.search.intra.update import UpdateStreams, has_backward
from autopar.search.intra.uses import firsts
from autopar.search.intra.work import Chains, busy_seconds, kernel_bytes, moved_bytes, stored_of, work_of
from autopar.search.problem import Problem
from autopar.sharding import Strategy
from autopar.solver import ChoiceProblem, Edge, Node
from autopar.solver import Usage as SolverUsage


@dataclass(frozen=True)
class ShardingProblem:
    """A `ChoiceProblem` and what its nodes mean.

    Args:
        problem: the numbers.
        mesh: the logical mesh that it is for.
        nodes: name, members and strategy labels of each node.
        values: every value by key.
        sites: every operator without regions, in running order.
        region_sites: every operator with regions.
        copies: shared copies of values.
        usages: what the problem's usages are of, in the same order.
        outputs: (node, layouts by strategy) of each top-level output; None for literals.
        notes: lines for the user.
        memory_bound: the memory limit binds, as in `autopar.plan.PlanContent`.
        broken: names of inputs whose constraint cannot hold on the mesh.
    """

    problem: ChoiceProblem
    mesh: LogicalMesh
    nodes: tuple[NodeDraft, ...]
    values: dict[str, ValueDraft]
    sites: tuple[SiteDraft, ...]
    region_sites: tuple[RegionSite, ...]
    copies: tuple[CopyDraft, ...]
    usages: tuple[UsageDraft, ...]
    outputs: tuple[tuple[int, tuple[Layout, ...]] | None, ...]
    notes: tuple[str, ...]
    memory_bound: bool = False
    broken: tuple[str, ...] = ()


# Beginnings of dtypes of a byte and less that numbers are encoded in: what widens them can be laid out anew.
_CODES = ("i8", "u8", "i4", "u4", "f8_", "f4_")


class Builder:
    """Walks the graph once; used by `build` and by the region handlers."""

    def __init__(
        self,
        mesh: LogicalMesh,
        cost: CostModel,
        split_phases: bool,
        offered: Offloading,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        self.mesh = mesh
        self.constraints = {c.value: c for c in constraints}
        self.broken: list[str] = []
        self.cost = cost
        self.split_phases = split_phases
        self.movable = offered.inputs
        self.growth = growth_of(cost.cluster)
        self.functions = frozenset(name for d in cost.cluster.device_types for name, _ in d.function_s)
        self.layouts = LayoutTable(mesh, cost)
        self.operators = OperatorTable(mesh)
        self.nodes: list[NodeDraft] = []
        self.edges: dict[tuple[int, int], Array] = {}
        self.values: dict[str, ValueDraft] = {}
        self.sites: list[SiteDraft] = []
        self.copies: list[CopyDraft] = []
        self.notes: dict[str, None] = dict.fromkeys(offered.notes)
        self.region_sites: list[RegionSite] = []
        self.busy: dict[tuple[Work, int], tuple[tuple[Strategy, ...], Array]] = {}
        self.chains: dict[int, tuple[Graph, Chains]] = {}
        self.time = 0
        self.phase = "update"
        self.cores: Mapping[str, bool] = {}
        self.on_chip: Collection[str] = ()
        self.updates = False
        self.streams = UpdateStreams()

    # -- nodes, edges, values ------------------------------------------------------------------

    def node(self, name: str, costs: Array, label: Callable[[int], str]) -> int:
        """Adds a node; its index. ``label`` says what a strategy is."""
        self.nodes.append(NodeDraft(name, np.asarray(costs, float), label))
        return len(self.nodes) - 1

    def edge(self, source: int, target: int, costs: Array) -> None:
        """Adds ``costs`` between two nodes (to the diagonal of a node's own costs if they are one)."""
        if source == target:
            self.nodes[source].costs = self.nodes[source].costs + np.diagonal(costs)
            return
        key = (source, target) if source < target else (target, source)
        matrix = costs if source < target else costs.T
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    def value(
        self, key: str, type: TensorType, node: int | None, layouts: Sequence[Layout], weight: float, **rest: object
    ) -> ValueDraft:
        """Adds a value."""
        found = ValueDraft(
            key,
            type,
            node,
            layouts if isinstance(layouts, tuple) else tuple(layouts),
            self.time,
            weight,
            phase=self.phase,
            **rest,  # type: ignore[arg-type]
        )
        self.values[key] = found
        return found

    def free_layouts(self, name: str, type: TensorType, partial: bool = False) -> tuple[int, tuple[Layout, ...]]:
        """A node that may have any layout of ``type`` at no cost: (node, its layouts)."""
        layouts = self.layouts.all(type, partial)
        return self.node(name, np.zeros(len(layouts)), functools.partial(layout_label, layouts)), layouts

    def use(
        self,
        key: str,
        node: int,
        required: Sequence[Layout],
        weight: float,
        consumer: str,
        phase: str,
        stacked: bool = False,
        heavy: bool = False,
    ) -> None:
        """Notes that a value is taken."""
        layouts = required if isinstance(required, tuple) else tuple(required)
        self.values[key].uses.append(Use(node, layouts, weight, self.time, consumer, phase, stacked, heavy))

    @staticmethod
    def summable(type: TensorType) -> bool:
        """Whether partial sums of ``type`` make sense."""
        return type.dtype != "bool" and not type.dtype.startswith("key<") and type.size > 0

    # -- graphs --------------------------------------------------------------------------------

    def graph(self, graph: Graph, prefix: str, weight: float) -> None:
        """Adds all operators of a graph whose inputs are there already."""
        light_readers: dict[str, list[bool]] = {}
        fusing_readers: dict[str, bool] = {}
        readers: dict[str, set[str]] = {}
        for op in graph.operators:
            for operand in op.operands:
                if isinstance(operand, str):
                    light_readers.setdefault(operand, []).append(is_fusible(op))
                    fusing_readers[operand] = fusing_readers.get(operand, True) and reads_fused(op)
                    readers.setdefault(operand, set()).add(op.id)
        returned = {o.operand for o in graph.outputs}
        shared = frozenset(name for name, ids in readers.items() if len(ids) + (name in returned) > 1)
        enclosing, outer, outer_chip = self.phase, self.cores, self.on_chip
        cores = attention_cores(graph) if self.cost.knows_kernels else {}
        on_chip = on_chip_operators(graph, cores) if self.cost.stack.fused_attention else ()
        for op in graph.operators:
            self.time += 1
            self.cores, self.on_chip = cores, on_chip
            self.phase = phase_of(op.scope, enclosing)
            handler = REGIONS.get(op.primitive)
            if handler is not None and op.regions:
                handler(self, graph, op, prefix, weight)
            elif op.primitive == "optimization_barrier":
                self._barrier(op, prefix, weight)
            elif is_generator(op):
                (result,) = op.results
                self.value(prefix + result.name, result.type, None, (), weight, zero=is_zero(op))
            else:
                kept = any(v.name in returned for v in op.results)
                fusable = not kept and is_fusible(op) and all(light_readers.get(v.name) == [True] for v in op.results)
                anew = not kept and all(fusing_readers.get(v.name, False) for v in op.results)
                self._operator(graph, op, prefix, weight, fusable, shared, anew, kept)
        self.phase, self.cores, self.on_chip = enclosing, outer, outer_chip

    def _basis(self, op: Operator, prefix: str) -> float:
        """Bytes of the stored values that an operator's results are computed from."""
        sources = {o: self.values[prefix + o] for o in op.reads}
        return sum(v.basis if v.transient else 0.0 if v.node is None else v.type.nbytes for v in sources.values())

    def _barrier(self, op: Operator, prefix: str, weight: float) -> None:
        for operand, result in zip(op.operands, op.results, strict=True):
            source = self.values[prefix + str(operand)]
            self.value(
                prefix + result.name, result.type, source.node, source.layouts, weight, zero=source.zero, alias=True
            )
            if source.node is not None:
                self.use(source.key, source.node, source.layouts, weight, prefix + op.id, self.phase)

    def _operator(
        self,
        graph: Graph,
        op: Operator,
        prefix: str,
        weight: float,
        fusable: bool,
        shared: frozenset[str],
        anew: bool,
        kept: bool,
    ) -> None:
        types = graph.operand_types(op)
        sources = [None if isinstance(o, Literal) else self.values[prefix + o] for o in op.operands]
        made = tuple(s is None or s.node is None for s in sources)
        zeros = tuple(
            o.is_zero if isinstance(o, Literal) else s is not None and s.zero
            for o, s in zip(op.operands, sources, strict=True)
        )
        options = self.operators.options(op, types, zeros, made)
        if not options.known:
            text = f"{op.primitive} has no sharding rule: it runs whole on every device ({op.source or op.id})"
            self.notes[text] = None
        if op.primitive.endswith("_callback"):
            text = f"{op.primitive} runs on one device, on whole arrays that are gathered for it ({op.source or op.id})"
            self.notes[text] = None
        basis, stored = self._basis(op, prefix), frozenset().union(*map(stored_of, sources))
        kernels = [self.values[k].type for k in sorted(stored)] if self.cost.knows_kernels else None
        sunk = not kept and kernels is not None and is_constant(op, sum(t.nbytes for t in kernels))
        updates = kernels is not None and self.updates and not prefix and self.phase == "update" and is_fusible(op)
        again = anew and (updates or is_recomputed(op, basis, self.growth))
        transient = fusable or sunk or again or op.id in self.on_chip
        moved = moved_bytes(op, types, sources, options, fusable)
        if kernels is not None and reads_fused(op):
            if updates:
                kernels = self.streams.read(op, stored, self.values, transient)
            moved = kernel_bytes(op, types, kernels, transient)
        work = work_of(op, types, options, moved, self._chains(graph), self.functions)
        core: Core = "" if op.id not in self.cores else "causal" if self.cores[op.id] else "whole"
        backward = bool(core) and self.phase == "backward"
        work = replace(work, fused=transient and is_fusible(op), core=core, backward=backward)
        if (
            op.primitive in ADDITIONS
            and not any(v.type.rank for v in op.results)
            and any(k.partial for s in sources if s is not None for k in s.layouts)
        ):
            options = self.operators.scalar_sums(options)
        options, told = asked(op, options, self.mesh)
        if told:
            self.notes[told] = None
        followed = None if told else self._followed(op, sources, options, shared)
        if followed is not None:
            options = followed[1]
        chosen = options.strategies
        busy = self._seconds(work, chosen, op, types) * weight
        if followed is None:
            node = self.node(prefix + op.id, busy, functools.partial(strategy_label, chosen))
        else:
            node = followed[0]
            self.nodes[node].costs = self.nodes[node].costs + busy
            self.nodes[node].members.append(prefix + op.id)
        for i, source in enumerate(sources):
            if source is not None and source.node is not None:
                heavy = not reads_fused(op)
                self.use(source.key, node, options.operands[i], weight, prefix + op.id, self.phase, heavy=heavy)
        of = sources[0] if op.primitive in RESHAPES else None
        view = of.source if of is not None else ""
        for j, result in enumerate(op.results):
            self.value(
                prefix + result.name, result.type, node, options.results[j], weight,
                fused=fusable, transient=transient, basis=basis, view=view,
                stored=stored if transient else frozenset(), constant=sunk,
            )  # fmt: skip
        self.sites.append(SiteDraft(prefix + op.id, op, types, work, node, chosen, busy, weight, self.time, self.phase))

    def _chains(self, graph: Graph) -> Chains | None:
        """The chains of a graph, where devices say what bringing operands into another order takes."""
        if all(d.reorder_efficiency is None for d in self.cost.cluster.device_types):
            return None
        if id(graph) not in self.chains:  # the key is an identity; what it is of is kept alive here
            self.chains[id(graph)] = (graph, Chains(graph))
        return self.chains[id(graph)][1]

    def _seconds(self, work: Work, chosen: tuple[Strategy, ...], op: Operator, types: Sequence[TensorType]) -> Array:
        """Busy seconds of one run of an operator, by strategy."""
        if (key := (work, id(chosen))) not in self.busy:
            self.busy[key] = (chosen, busy_seconds(self.cost, self.mesh.sizes, work, chosen, op, types))
        return self.busy[key][1]

    def _followed(
        self, op: Operator, sources: Sequence[ValueDraft | None], options: OperatorOptions, shared: frozenset[str]
    ) -> tuple[int, OperatorOptions] | None:
        """The node that ``op`` follows and its strategy for each of that node's choices; None if it has its own.

        Only the latest operand that is no input is followed, only if each of its layouts leaves one
        strategy. One that may be a partial sum is followed only by an operator that takes nothing else, if
        nothing else takes it: otherwise it may be better to finish the sum before, once for all who take it.
        """
        if op.effects:
            return None
        held = [(i, s) for i, s in enumerate(sources) if s is not None and s.node is not None]
        made = [(i, s) for i, s in held if not s.source]
        if not made:
            return None
        i, source = max(made, key=lambda e: (e[1].type.rank, e[1].time, -e[0]))
        if source.type.dtype.startswith(_CODES) and max(v.type.nbytes for v in op.results) > source.type.nbytes:
            return None  # what is sent is best sent as codes
        several = any(s.node != source.node for _, s in held)
        if (several or op.operands[i] in shared) and any(k.partial for k in source.layouts):
            return None
        alike = tuple(j for j, s in held if s is source)
        matched = self.operators.followed(options, i, alike, source.layouts)
        assert source.node is not None
        return None if matched is None else (source.node, matched)

    # -- edges ---------------------------------------------------------------------------------

    def _connect(self, value: ValueDraft) -> None:
        """Edges from a value to those who take it, through a shared copy where there are several."""
        if value.node is None:
            return
        uses = firsts(value.uses, self.split_phases)
        outside = [(u, new) for u, new in uses if u.node != value.node]
        for u, new in uses:
            if u.node == value.node and u.required != value.layouts:
                self._take(value.type, u.node, value.layouts, u, new)
        if value.source:
            self._connect_input(value, outside)
            return
        if len({u.node for u, _ in outside}) < 2:
            for u, new in outside:
                self._take(value.type, value.node, value.layouts, u, new)
            return
        phases = sorted({u.phase for u, _ in outside}) if self.split_phases else [""]
        for phase in phases:
            users = [(u, new) for u, new in outside if phase in ("", u.phase)]
            if len({u.node for u, _ in users}) < 2 and phase:
                for u, new in users:
                    self._take(value.type, value.node, value.layouts, u, new)
                continue
            kinds = self.layouts.together((value.layouts, *(u.required for u, _ in users)))
            hub = self.node(
                f"copy of {value.key}" + (f" ({phase})" if phase else ""),
                np.zeros(len(kinds)),
                functools.partial(layout_label, kinds),
            )
            self.nodes[hub].copy_of = value.key
            self.copies.append(CopyDraft(value.key, hub, kinds, (phase,)))
            self.edge(value.node, hub, self.layouts.resharding(value.type, value.layouts, kinds, value.weight))
            for u, new in users:
                self._take(value.type, hub, kinds, u, new)

    def _take(self, type: TensorType, node: int, layouts: tuple[Layout, ...], use: Use, new: NDArray[np.bool_]) -> None:
        """Adds what a use costs that takes a value of ``type`` from where ``node`` decides, in one of ``layouts``."""
        costs = self.layouts.resharding(type, layouts, use.required, use.weight)
        self.edge(node, use.node, costs if new.all() else np.where(new, costs, 0.0))

    def add_input(self, name: str, type: TensorType, role: str, readers: int, stacked: bool) -> None:
        """The node of a top-level input.

        With several readers, or a loop that takes slices, a choice is a pair (a, b): the input lies in
        layout a, and forward and backward operators may also take it from a copy in the coarser layout b.
        What is movable has each of these twice: on the device, and in host memory between updates.
        """
        every = self.layouts.all(type)
        plain = constrained(self.constraints, name, every, self.mesh)
        if not plain:
            self.broken.append(name)
            plain = every
        pairs = [(a, a) for a in plain]
        if readers > 1 or stacked:
            pairs = [(a, b) for a in plain for b in (a, *self.layouts.coarser(a))]

        copied, n = len(pairs) > len(plain), len(pairs)
        hosted = (False,) * n + (True,) * n if name in self.movable else ()
        pairs *= 2 if hosted else 1

        node = self.node(name, np.zeros(len(pairs)), functools.partial(input_label, pairs, n))
        self.value(name, type, node, [a for a, _ in pairs], 1.0, source=name, hosted=hosted)
        if copied:
            self.copies.append(CopyDraft(name, node, tuple(b for _, b in pairs)))

    def _connect_input(self, value: ValueDraft, readers: Sequence[tuple[Use, NDArray[np.bool_]]]) -> None:
        """Cost of an input's copy, once a phase that uses it, and the edges to the readers."""
        assert value.node is not None
        stored = value.layouts
        at = next((i for i, c in enumerate(self.copies) if c.key == value.key), None)
        used = stored if at is None else self.copies[at].layouts
        if at is not None:
            phases = {u.phase for u, _ in readers if u.phase != "update"} if self.split_phases else {""}
            self.copies[at] = replace(self.copies[at], phases=tuple(sorted(phases)) or ("",))
            gather = np.diagonal(self.layouts.resharding(value.type, stored, used))
            self.nodes[value.node].costs = gather * max(1, len(phases))
        for u, new in readers:
            direct = self.layouts.resharding(value.type, stored, u.required)
            costs = np.minimum(direct, self.layouts.resharding(value.type, used, u.required)) * u.weight
            if u.stacked or u.until:  # the loop may take what is there, not a copy that nobody counted
                here = np.array([[k in (a, b) for k in u.required] for a, b in zip(stored, used, strict=True)])
                if not u.stacked:  # or a small one
                    bytes = [local_bytes(value.type, k, self.mesh.sizes) for k in (stored, u.required)]
                    here |= bytes[0][:, None] >= bytes[1][None, :]
                costs = np.where(here, costs, np.inf)
            self.edge(value.node, u.node, np.where(new, costs, 0.0))

    def _outputs(self, graph: Graph) -> list[tuple[int, tuple[Layout, ...]] | None]:
        found: list[tuple[int, tuple[Layout, ...]] | None] = []
        for output in graph.outputs:
            if isinstance(output.operand, Literal):
                found.append(None)
                continue
            if output.updates is not None:
                target = self.values[output.updates]
                assert target.node is not None
                node, layouts = target.node, target.layouts
            else:
                node, layouts = self.free_layouts(f"result{output.path}", output.type)
            found.append((node, layouts))
            value = self.values[output.operand]
            if value.node is not None:
                value.uses.append(Use(node, layouts, 1.0, self.time, f"result{output.path}", "update"))
        return found


def build(problem: Problem, mesh: LogicalMesh, *, split_phases: bool = False) -> ShardingProblem:
    """States the sharding of a graph on a mesh as a `ChoiceProblem`.

    Args:
        problem: graph, costs, limits.
        mesh: the logical mesh.
        split_phases: whether forward and backward make their own copies of a value that is needed in
            another layout (less memory, more traffic) instead of one that lives through both.
    """
    graph = problem.graph
    constraints = problem.options.constraints
    b = Builder(mesh, problem.cost_model, split_phases, offloading(problem), constraints)
    readers = Counter(o for op in graph.operators for o in set(op.operands) if isinstance(o, str))
    stacks = {o for op in graph.operators if op.primitive == "scan" for o in op.reads}
    b.updates = has_backward(graph)
    for i in graph.inputs:
        b.add_input(i.name, i.type, i.role, readers[i.name], i.name in stacks)
    b.graph(graph, "", 1.0)
    b.time += 1
    outputs = b._outputs(graph)
    for value in list(b.values.values()):
        b._connect(value)
    add_host_seconds(problem.cost_model, b.nodes, b.values, mesh.sizes)
    held = usages(problem, b.values, b.copies, mesh.sizes, b.time + 1)
    matrices = {id(m): m for m in b.edges.values()}  # many edges share one
    counts = {identity: bool(m.any()) for identity, m in matrices.items()}
    choice = ChoiceProblem(
        nodes=tuple(Node(n.name, n.costs) for n in b.nodes),
        edges=tuple(Edge(s, t, b.edges[s, t]) for s, t in sorted(b.edges) if counts[id(b.edges[s, t])]),
        usages=tuple(SolverUsage(u.node, u.start, u.stop, u.bytes) for u in held),
        limit_bytes=float(problem.memory_limit_bytes),
    )
    return ShardingProblem(
        choice,
        mesh,
        tuple(b.nodes),
        b.values,
        tuple(b.sites),
        tuple(b.region_sites),
        tuple(b.copies),
        tuple(held),
        tuple(outputs),
        tuple(b.notes),
        broken=tuple(b.broken),
    )
