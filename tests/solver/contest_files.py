"""Choice problems as files of the contest."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from autopar.solver import ChoiceProblem, Edge, Node, ProblemError
from autopar.solver.contest import FORBIDDEN
from autopar.solver.problem import Array


def write_contest(problem: ChoiceProblem, path: str | Path, *, name: str = "", cost_unit: float | None = None) -> None:
    """Write ``problem`` to a file; see `encode_contest`. A name that ends in ``.gz`` is compressed by gzip."""
    data = encode_contest(problem, name=name, cost_unit=cost_unit)
    # No time in the header: the same problem gives the same bytes.
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def encode_contest(problem: ChoiceProblem, *, name: str = "", cost_unit: float | None = None) -> bytes:
    """``problem`` as a document of the contest's format.

    The format has one interval a node: further usages of a node go to nodes behind those of ``problem``, each tied to
    its node by an edge that forbids all but equal strategies. A choice for the document starts with that for
    ``problem``. No limit becomes one that never binds. Names of nodes are not kept.

    Args:
        problem: what to write.
        name: of the problem.
        cost_unit: costs are divided by this and rounded to whole numbers, which is what the contest's own programs
            take (1e-9 for nanoseconds where costs are seconds); None writes them as they are.

    Raises:
        ProblemError: where a finite cost is so large that it would be forbidden.
    """
    single = _one_usage_each(problem)
    intervals = [(0, 0)] * len(single.nodes)
    usages: list[list[float]] = [[0] * node.costs.size for node in single.nodes]
    for use in single.usages:
        intervals[use.node], usages[use.node] = (use.start, use.stop), _whole(use.bytes)
    limit = single.limit_bytes
    if limit is None or math.isinf(limit):
        limit = math.ceil(math.fsum(float(use.bytes.max()) for use in single.usages))
    data = {
        "problem": {
            "name": name,
            "nodes": {
                "intervals": intervals,
                "costs": [_costs(node.costs, cost_unit) for node in single.nodes],
                "usages": usages,
            },
            "edges": {
                "nodes": [(edge.source, edge.target) for edge in single.edges],
                "costs": [_costs(edge.costs.ravel(), cost_unit) for edge in single.edges],
            },
            "usage_limit": _whole(np.array([limit]))[0],
        }
    }
    return msgspec.json.encode(data)


def _one_usage_each(problem: ChoiceProblem) -> ChoiceProblem:
    nodes, edges, usages = list(problem.nodes), list(problem.edges), []
    seen: set[int] = set()
    for use in problem.usages:
        if use.start == use.stop:
            continue
        at = use.node
        if at in seen:
            size = nodes[at].costs.size
            edges.append(Edge(at, len(nodes), np.where(np.eye(size, dtype=np.bool_), 0.0, math.inf)))
            at = len(nodes)
            nodes.append(Node(f"usage {at}", np.zeros(size)))
        seen.add(at)
        usages.append(replace(use, node=at))
    names = tuple(replace(node, name=str(v)) for v, node in enumerate(nodes))
    return ChoiceProblem(names, tuple(edges), tuple(usages), problem.limit_bytes)


def _costs(costs: Array, unit: float | None) -> Sequence[float]:
    finite = np.isfinite(costs)
    values = np.where(finite, costs, 0.0)
    if unit is not None:
        values = np.rint(values / unit)
    if values.max() >= FORBIDDEN:
        raise ProblemError(
            f"a cost of {values.max():g} would be forbidden: the format forbids 10^18 and more",
            remedy="give a larger cost_unit",
        )
    written = _whole(values)
    return [cost if good else FORBIDDEN for cost, good in zip(written, finite.tolist(), strict=True)]


def _whole(values: Array) -> list[float]:
    """As integers where all of them are, so that nothing is rounded and readers of integers can take them."""
    if (values == np.rint(values)).all() and np.abs(values).max() < 2.0**63:
        return [int(value) for value in values.tolist()]
    return list(values.tolist())
