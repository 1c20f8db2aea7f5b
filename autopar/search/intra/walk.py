"""`GraphWalk`: adds the operators of a graph to a `Builder`, one node for each that does not follow an operand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost import ATTENTIONS, PRODUCTS, Core, KernelWork, kind_of, run_bytes
from autopar.ir import Graph, Literal, Operator, TensorType
from autopar.ir.primitives import (
    ADDITIONS,
    ALIASES,
    RESHAPES,
    is_fusible,
    is_generator,
    is_zero,
    reads_fused,
    wire_of,
)
from autopar.search.intra.attention import AttentionSite
from autopar.search.intra.builder import Builder, asked, strategy_label
from autopar.search.intra.edges import SharedEdges
from autopar.search.intra.fusion import JoinedKernels, StoredTypes, UpdateStreams, growth_of, is_constant, is_recomputed
from autopar.search.intra.host_update import written_s
from autopar.search.intra.operators import OperatorOptions, Signature
from autopar.search.intra.regions import REGIONS, RegionDraft, RegionFacts, region_facts
from autopar.search.intra.sharding_problem import Array, SiteDraft, UsageDraft, Use, ValueDraft
from autopar.search.intra.work import (
    Chains,
    busy_seconds,
    dtype_of,
    kernel_bytes,
    moved_bytes,
    stored_of,
    with_order,
)
from autopar.sharding import Strategy

# Beginnings of dtypes of a byte and less that numbers are encoded in: what widens them can be laid out again.
_CODES = ("i8", "u8", "i4", "u4", "f8_", "f4_")


@dataclass(frozen=True)
class _Kernel:
    """Run of an operator: its work, and its part in memory.

    Args:
        work: what one run takes.
        returned: a result of it is one of the graph.
        in_memory: it takes its operands from memory.
        fused: its results go to an only reader that is elementwise too.
        transient: its readers compute its results as they read.
        basis: bytes of the stored values that its results are computed from.
        stored: keys of the values in memory that a kernel reads for its operands.
        constant: constants alone decide its results.
        signature: what its strategies depend on.
    """

    work: KernelWork
    returned: bool
    in_memory: bool
    fused: bool
    transient: bool
    basis: float
    stored: frozenset[str]
    constant: bool
    signature: Signature


@dataclass(frozen=True)
class GraphKernels:
    """Kernels of a graph in the order in which a walk comes to them. They depend on no mesh.

    Args:
        kernels: of the operators that have strategies.
    """

    kernels: tuple[_Kernel, ...]

    @property
    def entries(self) -> int:
        """Numbers that take as many bytes."""
        return 64 * len(self.kernels)


class GraphWalk:
    """Walks a graph and its regions once.

    Args:
        builder: where nodes, values and uses go.
        updates: whether what is of no pass updates parameters (`autopar.search.intra.fusion.has_backward`).
        known: kernels that a walk of the same graph for another mesh has found; None for the first walk.
    """

    def __init__(self, builder: Builder, updates: bool, known: GraphKernels | None = None) -> None:
        cluster = builder.cost.cluster
        self.builder = builder
        self.updates = updates
        self.fuses, self.fuses_products = builder.cost.fuses, builder.cost.fuses_products
        # Whether devices say what bringing operands into another order takes.
        self.reorders = any(d.reorder_efficiency is not None for d in cluster.device_types)
        self.operators = builder.tables.operators
        self.growth = growth_of(cluster)
        self.functions = frozenset(name for d in cluster.device_types for name, _ in d.function_s)
        self.busy = builder.tables.busy
        self.streams, self.joined = UpdateStreams(), JoinedKernels()
        self.types: dict[frozenset[str], StoredTypes] = {}
        self.edges = SharedEdges()
        self.known = iter(known.kernels if known is not None else ())
        self.found: list[_Kernel] = []

    def graph(self, graph: Graph, prefix: str, weight: float) -> None:
        """Adds all operators of a graph whose inputs are there already.

        Args:
            graph: the step, or a region of one of its operators.
            prefix: names of the enclosing regions.
            weight: how often a step it runs.
        """
        b = self.builder
        on_host = frozenset() if prefix else b.offered.update.operators
        around = region_facts(graph, prefix, weight, b.phase, b.cost, on_host)
        enclosing = b.phase
        for op in graph.operators:
            b.time += 1
            b.phase = around.phases[op.id]
            handler = REGIONS.get(op.primitive)
            if handler is not None and op.regions:
                handler(RegionDraft(b, op, prefix, weight), self.graph, graph)
            elif op.primitive in ALIASES:
                self._alias(op, prefix, weight)
            elif is_generator(op):
                (result,) = op.results
                b.value(prefix + result.name, result.type, None, (), weight, zero=is_zero(op))
            else:
                self._operator(graph, op, around)
        b.phase = enclosing

    def _on_host(self, op: Operator, prefix: str) -> bool:
        """Whether an operator runs on the host."""
        return not prefix and op.id in self.builder.offered.update.operators

    def _alias(self, op: Operator, prefix: str, weight: float) -> None:
        b = self.builder
        for operand, result in zip(op.operands, op.results, strict=True):
            source = b.values[prefix + str(operand)]
            key = prefix + result.name
            wire = wire_of(op)
            b.value(
                key, result.type, source.node, source.layouts, weight,
                zero=source.zero, alias=True, wire=wire, source=source.source if wire else "",
            )  # fmt: skip
            b.space.same(source.key, key)
            if source.node is not None:
                taken = Use(source.node, tuple(source.layouts), weight, b.time, prefix + op.id, b.phase)
                b.use(source.key, taken)

    def _operator(self, graph: Graph, op: Operator, around: RegionFacts) -> None:
        """Adds an operator: a node of its own or one that it follows, its uses of operands, its results."""
        b, id, weight = self.builder, around.prefix + op.id, around.weight
        sources = [None if isinstance(o, Literal) else b.values[around.prefix + o] for o in op.operands]
        kernel = next(self.known, None)
        if kernel is None:
            signature = self._signature(graph, op, sources)
            options = self._options(op, signature)
            kernel = self._kernel(graph, op, signature, around, sources, options)
        else:
            options = self._options(op, kernel.signature)
        self.found.append(kernel)
        types = kernel.signature.operand_types
        options, constraint = asked(op, self._with_scalar_sums(op, sources, options), b.mesh)
        if constraint:
            b.notes[constraint] = None
        options = b.space.kept(op, around.prefix, options)
        followed = None if constraint else self._followed(op, sources, options, around)
        if followed is not None:
            options = followed[1]
        strategies = options.strategies
        there = self._on_host(op, around.prefix)
        busy = self._seconds(kernel.work, strategies, op, types)
        if b.stack_moves:
            busy = busy + self._stacking_s(op, strategies, types, around.prefix)
        if weight != 1.0:
            busy = busy * weight
        if there:  # one pass over what is returned, into which the others are fused
            written = [written_s(b.cost, op, s.result_layouts, b.mesh.sizes) for s in strategies]
            busy = kernel.returned * np.array(written)
        if followed is None:
            node = b.node(id, busy, functools.partial(strategy_label, strategies))
        else:
            node = followed[0]
            b.nodes[node].costs = b.nodes[node].costs + busy
            b.nodes[node].members.append(id)
        for i, source in enumerate(sources):
            if source is not None and source.node is not None:
                heavy = kernel.in_memory and not there
                layouts = options.operands[i]
                b.use(source.key, Use(node, layouts, weight, b.time, id, b.phase, heavy=heavy, there=there))
        of = sources[0] if op.primitive in RESHAPES else None
        writes = op.primitive == "dynamic_update_slice" and sources[0] is not None and sources[0].in_rows
        for j, result in enumerate(op.results):
            b.value(
                around.prefix + result.name, result.type, node, options.results[j], weight,
                fused=kernel.fused, transient=kernel.transient, basis=kernel.basis,
                view=of.source if of is not None else "",
                stored=kernel.stored if kernel.transient else frozenset(), constant=kernel.constant,
                widened=around.widened.get(result.name, ""),
                made_there=there, hosted=(True,) * len(strategies) if there else (), alias=writes, in_rows=writes,
            )  # fmt: skip
        if op.primitive in ATTENTIONS:
            sites = [AttentionSite(b.cost, b.mesh, s, op, types) for s in strategies]
            needed = np.array([s.workspace_bytes for s in sites], float)
            b.workspaces.append(UsageDraft(node, b.time, b.time + 1, needed, "temporaries", f"{id}: blocks"))
        site = SiteDraft(id, op, types, kernel.work, node, strategies, busy, weight, b.time, b.phase)
        b.sites.append(self.edges.add(b, site, around.prefix) if options.sends else site)

    def _signature(self, graph: Graph, op: Operator, sources: Sequence[ValueDraft | None]) -> Signature:
        """The signature of an operator in its place."""
        on_demand = tuple([s is None or s.node is None for s in sources])
        zeros = tuple(
            [
                o.is_zero if isinstance(o, Literal) else s is not None and s.zero
                for o, s in zip(op.operands, sources, strict=True)
            ]
        )
        return Signature.of(op, graph.operand_types(op), zeros, on_demand)

    def _options(self, op: Operator, signature: Signature) -> OperatorOptions:
        """Strategies by the rule of an operator, with a note where it has none or runs on one device."""
        options = self.operators.options(op, signature)
        place = op.source or op.id
        if not options.known:
            self.builder.notes[f"{op.primitive} has no sharding rule: it runs whole on every device ({place})"] = None
        if op.primitive.endswith("_callback"):
            text = f"{op.primitive} runs on one device, on whole arrays that are gathered for it ({place})"
            self.builder.notes[text] = None
        return options

    def _kernel(
        self,
        graph: Graph,
        op: Operator,
        signature: Signature,
        around: RegionFacts,
        sources: Sequence[ValueDraft | None],
        options: OperatorOptions,
    ) -> _Kernel:
        """Work of an operator in its place; which of its operands and results are in memory."""
        b, types = self.builder, signature.operand_types
        elementwise, returned = is_fusible(op), around.returns(op)
        reads = elementwise or reads_fused(op)
        stored = frozenset().union(*map(stored_of, sources))
        known = self._types(stored)
        kernels: Sequence[TensorType] | None = known.types if self.fuses else None
        if self.fuses_products:  # each value once
            basis: float = known.nbytes
        else:
            operands = {s.key: s for s in sources if s is not None}
            basis = sum(v.basis if v.transient else 0.0 if v.node is None else v.type.nbytes for v in operands.values())
        constant = elementwise and not returned and kernels is not None and is_constant(op, known.nbytes)
        updates = kernels is not None and self.updates and not around.prefix and b.phase == "update" and elementwise
        fused = elementwise and not returned and around.fuses(op)
        transient = fused or constant or op.id in around.on_chip
        if not transient and elementwise and not returned and around.may_recompute(op):
            transient = updates or is_recomputed(op, basis, self.growth)
        if kernels is None or not reads:
            moved = moved_bytes(op, types, sources, options, fused)
            if self.fuses_products:
                self.joined.begin(op, [around.prefix + v.name for v in op.results], b.time)
        else:
            if updates:
                kernels = self.streams.read(op, known, transient)
            elif self.fuses_products and not transient:
                results = [around.prefix + v.name for v in op.results]
                kernels = self.joined.read(op, results, stored, b.values, b.time)
            moved = kernel_bytes(op, types, kernels, transient)
        core: Core = "" if op.id not in around.cores else "causal" if around.cores[op.id] else "whole"
        work = KernelWork(
            options.flops,
            moved,
            dtype_of(op, types),
            kind_of(op, types),
            run_bytes=run_bytes(op, types),
            fused=transient and elementwise,
            core=core,
            backward=bool(core) and b.phase == "backward",
        )
        work = with_order(work, op, types, graph.fact(Chains) if self.reorders else None, self.functions)
        return _Kernel(work, returned, not reads, fused, transient, basis, stored, constant, signature)

    def _types(self, stored: frozenset[str]) -> StoredTypes:
        """Types of values in memory: many operators of an update read the same, of which there may be hundreds."""
        if stored not in self.types:
            self.types[stored] = StoredTypes(tuple((k, self.builder.values[k].type) for k in sorted(stored)))
        return self.types[stored]

    def _with_scalar_sums(
        self, op: Operator, sources: Sequence[ValueDraft | None], options: OperatorOptions
    ) -> OperatorOptions:
        """``options``, with sums of scalars that are left to do for an addition of such."""
        if op.primitive not in ADDITIONS or any(v.type.rank for v in op.results):
            return options
        partial = any(k.partial for s in sources if s is not None for k in s.layouts)
        return self.operators.scalar_sums(options) if partial else options

    def _seconds(
        self, work: KernelWork, strategies: tuple[Strategy, ...], op: Operator, types: Sequence[TensorType]
    ) -> Array:
        """Busy seconds of one run of an operator, by strategy."""
        if (key := (work, id(strategies))) not in self.busy:
            seconds = busy_seconds(self.builder.cost, self.builder.mesh, work, strategies, op, types)
            self.busy[key] = (strategies, seconds)
        return self.busy[key][1]

    def _stacking_s(
        self, op: Operator, strategies: tuple[Strategy, ...], types: Sequence[TensorType], prefix: str
    ) -> Array | float:
        """Seconds that one run of an operator takes longer for stacks that it writes or reads, by strategy."""
        moves, sizes = self.builder.stack_moves, self.builder.mesh.sizes
        slices = [
            (prefix + v.name, v.type, [s.result_layouts[j] for s in strategies]) for j, v in enumerate(op.results)
        ]
        if op.primitive in PRODUCTS:
            operands = ((i, o) for i, o in enumerate(op.operands) if isinstance(o, str))
            slices += [(prefix + o, types[i], [s.operand_layouts[i] for s in strategies]) for i, o in operands]
        more: Array | float = 0.0
        for key, type, layouts in slices:
            if key in moves:
                bytes = np.array([k.local_bytes(type, sizes) for k in layouts], float)
                more = more + self.builder.cost.stacking_s(bytes, moves.pop(key))
        return more

    def _followed(
        self, op: Operator, sources: Sequence[ValueDraft | None], options: OperatorOptions, around: RegionFacts
    ) -> tuple[int, OperatorOptions] | None:
        """The node that ``op`` follows and its strategy for each of that node's choices; None if it has its own.

        Only the latest operand that is no input is followed, only if each of its layouts leaves one
        strategy. One that may be a partial sum is followed only by an operator that takes nothing else, if
        nothing else takes it: otherwise it may be better to finish the sum before, once for all who take it. Nor by
        one that makes it wider, unless that is a gradient of a parameter, which is summed as wide as it is kept.
        """
        if op.effects:
            return None
        laid_out = [(i, s) for i, s in enumerate(sources) if s is not None and s.node is not None]
        computed = [(i, s) for i, s in laid_out if not s.source]
        if not computed:
            return None
        i, source = computed[0]
        if sources[0] is not None and sources[0].in_rows:  # rows lie as their stack does
            i, source = 0, sources[0]
        elif len(computed) > 1:
            i, source = max(computed, key=lambda e: (e[1].type.rank, e[1].time, -e[0]))
        if source.wire:
            return None  # in its format it is sent, what is made of it is not
        if source.type.dtype.startswith(_CODES) and max(v.type.nbytes for v in op.results) > source.type.nbytes:
            return None  # what is sent is best sent as codes
        if self.operators.partial(source.layouts):
            several = any(s.node != source.node for _, s in laid_out)
            widens = all(v.name in around.inner and v.type.nbytes > source.type.nbytes for v in op.results)
            if several or op.operands[i] in around.shared or widens:
                return None
        same = tuple(j for j, s in laid_out if s is source)
        matched = self.operators.followed(options, i, same, source.layouts)
        assert source.node is not None
        return None if matched is None else (source.node, matched)
