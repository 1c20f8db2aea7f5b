"""Tables of a mesh that all statements of sharding problems on it share.

Layouts, paths between them, strategies of operators and their seconds depend on types, the mesh and prices alone:
layers, stages, numbers of microbatches and levels of recomputation ask for the same ones again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel, KernelWork
from autopar.search.intra.draft import Array
from autopar.search.intra.layouts import LayoutTable
from autopar.search.intra.operators import OperatorTable
from autopar.search.problem import Problem
from autopar.sharding import Strategy


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
