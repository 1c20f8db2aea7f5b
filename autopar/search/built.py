"""Integer programs of a graph whatever its memory limit: a stage is planned within one limit after another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Graph
from autopar.search.intra import ShardingProblem
from autopar.search.policy import SearchPolicy
from autopar.search.problem import Options, Problem, Subproblem
from autopar.solver import Solution

#: Under which the memo of a search has what was built last.
_LAST = "built last"


@dataclass(frozen=True)
class _Asked:
    """All of a problem but its graph, its memory limit and the seconds that its plan must stay below."""

    cluster: Cluster
    cost_model: CostModel
    options: Options
    policy: SearchPolicy
    subproblem: Subproblem

    @staticmethod
    def of(problem: Problem) -> _Asked:
        # What may lie in host memory is measured by the limit.
        options, limit = problem.options, None if problem.options.offload == "none" else problem.memory_limit_bytes
        return _Asked(
            problem.cluster,
            problem.cost_model,
            replace(options, memory_limit_bytes=limit),
            problem.policy,
            replace(problem.subproblem, cutoff_s=math.inf),
        )


@dataclass(eq=False)
class BuiltProblems:
    """What is known of one problem under any memory limit.

    Args:
        graph: of the problem.
        asked: of it.
        problems: by mesh, and whether phases make copies of their own, under some limit.
        looks: without a limit, by mesh and the seconds to stay below.
    """

    graph: Graph
    asked: _Asked
    problems: dict[tuple[LogicalMesh, bool], ShardingProblem] = field(default_factory=dict)
    looks: dict[tuple[LogicalMesh, float], Solution | None] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        return sum(n.costs.size for s in self.problems.values() for n in s.nodes)


def built_for(problem: Problem) -> BuiltProblems:
    """What is built for a problem: that of the last one where only the limit differs. One problem's is kept at a time.

    Args:
        problem: to be sharded.
    """
    last, asked = problem.memo.get(_LAST), _Asked.of(problem)
    if isinstance(last, BuiltProblems) and last.graph is problem.graph and last.asked == asked:
        return last
    built = BuiltProblems(problem.graph, asked)
    problem.memo.keep(_LAST, built)
    return built
