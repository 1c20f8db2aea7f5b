"""`Recall`: problems of one search that arrive in another process one by one share there what they compute once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.ir import Graph
from autopar.search.memo import Memo
from autopar.search.problem import Problem
from autopar.solver.meter import Meter

Argument = TypeVar("Argument")


def metered(argument: Argument, meter: Meter) -> Argument:
    """A problem whose work is counted by a meter; anything else as it is."""
    return replace(argument, meter=meter) if isinstance(argument, Problem) else argument


@dataclass(eq=False)
class Recall:
    """Values that a process knows from its earlier calls.

    Args:
        memo: what their problems have computed.
        graphs: theirs, the latest at the end.
    """

    memo: Memo = field(default_factory=Memo)
    graphs: deque[Graph] = field(default_factory=deque)

    def known(self, argument: Argument) -> Argument:
        """A problem with the graph, if it is equal, and the memo of those before; anything else as it is."""
        if not isinstance(argument, Problem):
            return argument
        graph = next((graph for graph in self.graphs if graph == argument.graph), None)
        if graph is None:
            graph = argument.graph
            self.graphs.append(graph)
            if len(self.graphs) > argument.policy.workers.most_graphs:
                self.graphs.popleft()
        return replace(argument, graph=graph, memo=self.memo)
