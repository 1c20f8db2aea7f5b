"""`Builder`: nodes, edges, values and their uses, as a walk of the graph adds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Layout, TensorType
from autopar.ir.types import has_zero
from autopar.search.intra.draft import Array, CopyDraft, NodeDraft, RegionSite, SiteDraft, UsageDraft, Use, ValueDraft
from autopar.search.intra.host import NOTHING, Offloading
from autopar.search.intra.labels import layout_label, stack_label
from autopar.search.intra.tables import MeshTables


class Builder:
    """A `ChoiceProblem` under construction.

    Args:
        mesh: the logical mesh.
        cost: prices.
        tables: of the mesh under these prices.
        split_phases: whether forward and backward make their own copies of a value.
        offered: what may lie in host memory.
        donated: inputs whose buffers the step may reuse.

    ``time`` is that of the operator at hand, each operator being a step of time; ``phase`` is its part of the train
    step.
    """

    def __init__(
        self,
        mesh: LogicalMesh,
        cost: CostModel,
        tables: MeshTables,
        split_phases: bool,
        offered: Offloading = NOTHING,
        donated: Collection[str] = (),
    ) -> None:
        self.mesh = mesh
        self.cost = cost
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
