"""`Builder`: nodes, edges, values and their uses, as a walk of the graph adds them.

`MeshTables` are shared by all statements of sharding problems on a mesh: layouts, paths between them, strategies of
operators and their seconds depend on types, the mesh and prices alone, so that layers, stages, numbers of microbatches
and levels of recomputation ask for the same ones again and again. Constraints of the user leave out layouts of inputs
and strategies of operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel, KernelWork
from autopar.ir import Layout, Operator, TensorType
from autopar.ir.types import has_zero
from autopar.search.constraints import Constraint, keeps, shards_of
from autopar.search.intra.host import IN_HOST_MEMORY, NOTHING, Offloading
from autopar.search.intra.layouts import LayoutTable
from autopar.search.intra.operators import OperatorOptions, OperatorTable
from autopar.search.intra.sharding_problem import (
    Array,
    CopyDraft,
    NodeDraft,
    RegionSite,
    SiteDraft,
    UsageDraft,
    Use,
    ValueDraft,
)
from autopar.search.intra.space import SpaceSplits
from autopar.search.problem import Problem
from autopar.sharding import Strategy


def layout_label(layouts: Sequence[Layout], k: int) -> str:
    """The k-th of ``layouts``: ``[x,.]``."""
    return str(layouts[k])


def stack_label(layouts: Sequence[Layout], on_devices: int, k: int) -> str:
    """The k-th of ``layouts``; those from ``on_devices`` on are of a stack in host memory."""
    return f"{layouts[k]}{IN_HOST_MEMORY if k >= on_devices else ''}"


def strategy_label(strategies: Sequence[Strategy], k: int) -> str:
    """Layouts of the k-th of ``strategies``: ``[x,.],[.,.] -> [x,.]``."""
    strategy = strategies[k]
    return f"{','.join(map(str, strategy.operand_layouts))} -> {','.join(map(str, strategy.result_layouts))}"


def input_label(pairs: Sequence[tuple[Layout, Layout]], on_devices: int, k: int) -> str:
    """Layouts of the k-th of ``pairs``, as stored and as gathered; those from ``on_devices`` on lie in host memory."""
    stored, read = pairs[k]
    where = IN_HOST_MEMORY if k >= on_devices else ""
    return (f"{stored}" if stored == read else f"{stored}, gathered to {read}") + where


@dataclass(eq=False)
class MeshTables:
    """Tables of one mesh and cost model.

    Args:
        layouts: of values.
        operators: strategies of operators.
        busy: busy seconds of operators by strategy, with the strategies, whose identity is part of the key.
    """

    layouts: LayoutTable
    operators: OperatorTable
    busy: dict[tuple[KernelWork, int], tuple[tuple[Strategy, ...], Array]] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        return self.layouts.entries


def tables_of(problem: Problem, mesh: LogicalMesh) -> MeshTables:
    """The tables of a mesh under the prices of a problem, which all problems of one search share."""
    cost: CostModel = problem.cost_model
    key = problem.store.key("tables", None, mesh, cost)
    return problem.store.once(key, lambda: MeshTables(LayoutTable(mesh, cost), OperatorTable(mesh)))


def constrained(
    constraints: Mapping[str, Constraint], name: str, layouts: tuple[Layout, ...], mesh: LogicalMesh
) -> tuple[Layout, ...]:
    """The ``layouts`` of an input that keep the constraint on it; none where it cannot hold on ``mesh``.

    Args:
        constraints: by the name of the input.
        name: of the input.
        layouts: that the input may have.
        mesh: where.
    """
    constraint = constraints.get(name)
    if constraint is None:
        return layouts
    return tuple(k for k in layouts if constraint.holds(k, mesh.sizes))


def asked(op: Operator, options: OperatorOptions, mesh: LogicalMesh) -> tuple[OperatorOptions, str]:
    """Strategies of ``op`` under the layout that the user's code asks for, and a line on whether it is kept.

    Where nothing is said the line is empty; where ``mesh`` cannot say it ``options`` are as they were.
    """
    wanted = shards_of(op)
    if wanted is None:
        return options, ""
    kept = tuple(s for s in options.strategies if keeps(wanted, s.result_layouts[0], mesh.sizes))
    shards = ", ".join("any" if n < 0 else str(n) for n in wanted)
    said = "kept" if kept else f"not kept: the mesh {mesh} cannot say it"
    note = f"{op.primitive} to {shards} shards by dim ({op.source or op.id}): {said}"
    return (options.only(kept) if kept else options), note


class Builder:
    """A `ChoiceProblem` under construction.

    Args:
        tables: of the logical mesh under the prices.
        split_phases: whether forward and backward make their own copies of a value.
        offered: what may lie in host memory.
        donated: inputs whose buffers the step may reuse.
        space: splits of space that constraints name; None without such.

    ``time`` is that of the operator at hand, each operator being a step of time; ``phase`` is its part of the train
    step.
    """

    def __init__(
        self,
        tables: MeshTables,
        split_phases: bool,
        offered: Offloading = NOTHING,
        donated: Collection[str] = (),
        space: SpaceSplits | None = None,
    ) -> None:
        self.mesh = tables.layouts.mesh
        self.space = space or SpaceSplits(self.mesh)
        self.cost: CostModel = tables.layouts.cost
        self.split_phases = split_phases
        self.tables = tables
        self.layouts = tables.layouts
        self.nodes: list[NodeDraft] = []
        self.edges: dict[tuple[int, int], Array] = {}
        self.values: dict[str, ValueDraft] = {}
        self.sites: list[SiteDraft] = []
        self.region_sites: list[RegionSite] = []
        self.copies: list[CopyDraft] = []
        self.workspaces: list[UsageDraft] = []
        self.notes: dict[str, None] = dict.fromkeys(offered.notes)
        self.offered = offered
        self.donated = set(donated)
        #: Prefixes of names in the loops of stages.
        self.stage_bodies: set[str] = set()
        #: Of results of loops' bodies, and of slices of stacks until a product reads them: see `CostModel.stacking_s`.
        self.stack_moves: dict[str, int] = {}
        self.broken: list[str] = []
        self.time = 0
        self.phase = "update"

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
        """Adds a value; ``rest`` are further fields of `ValueDraft`."""
        layouts = layouts if isinstance(layouts, tuple) else tuple(layouts)
        value = ValueDraft(key, type, node, layouts, self.time, weight, phase=self.phase, **rest)  # type: ignore[arg-type]
        self.values[key] = value
        return value

    def free_layouts(self, name: str, type: TensorType, partial: bool = False) -> tuple[int, tuple[Layout, ...]]:
        """A node that may have any layout of ``type`` at no cost: (node, its layouts)."""
        layouts = self.layouts.all(type, partial)
        return self.node(name, np.zeros(len(layouts)), functools.partial(layout_label, layouts)), layouts

    def free_places(self, name: str, type: TensorType) -> tuple[int, tuple[Layout, ...], tuple[bool, ...]]:
        """A node of a stack that loops alone take: (node, layouts of its slices, whether it lies in host memory).

        Args:
            name: of the stack.
            type: of a slice.
        """
        there = self.layouts.all(type)
        here = () if self.offered.forced else self.layouts.all(type, is_summable(type))
        layouts = (*here, *there)
        node = self.node(name, np.zeros(len(layouts)), functools.partial(stack_label, layouts, len(here)))
        return node, layouts, (False,) * len(here) + (True,) * len(there)

    def use(self, key: str, use: Use) -> None:
        """Notes that a consumer takes a value."""
        value = self.values[key]
        if use.there and value.hosted:
            use = replace(use, as_made=(True,) * len(use.required))
        value.uses.append(use)


def is_summable(type: TensorType) -> bool:
    """Whether partial sums of ``type`` make sense."""
    return type.dtype != "bool" and not type.dtype.startswith("key<") and has_zero(type.dtype) and type.size > 0
