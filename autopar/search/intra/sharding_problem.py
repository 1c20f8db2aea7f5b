"""`ShardingProblem`: the numbers of a `ChoiceProblem` with what they are of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.cluster import LogicalMesh
from autopar.ir import Layout
from autopar.search.intra.draft import CopyDraft, NodeDraft, RegionSite, SiteDraft, UsageDraft, ValueDraft
from autopar.solver import ChoiceProblem

#: Numbers that take as many bytes as a draft does: a kilobyte.
_NUMBERS_OF_DRAFT = 128


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

    @cached_property
    def entries(self) -> int:
        """Numbers in its arrays, about: those of its nodes, and as many as its drafts take. Edges are in tables."""
        drafts = len(self.nodes) + len(self.values) + len(self.sites) + len(self.copies) + len(self.usages)
        return sum(n.costs.size for n in self.nodes) + _NUMBERS_OF_DRAFT * drafts
