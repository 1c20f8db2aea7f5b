"""`get_ready`: a first problem, after which others are solved sooner."""

from __future__ import annotations

import numpy as np

from autopar.solver.messages import Messages
from autopar.solver.presolve import MANY, reduce_problem
from autopar.solver.problem import ChoiceProblem, Edge, Node


def get_ready() -> None:
    """Reduces a large problem and sends messages once: numba, where it is installed, loads what it compiled, which
    takes half a second. For a process that waits for work."""
    rng = np.random.default_rng(0)
    nodes = tuple(Node(str(v), rng.uniform(size=3)) for v in range(MANY))
    edges = tuple(Edge(v, (v + k) % MANY, rng.uniform(size=(3, 3))) for v in range(MANY) for k in (1, 7))
    reduced = reduce_problem(ChoiceProblem(nodes, edges)).problem
    if reduced is not None:
        Messages.of(reduced).sweep()
