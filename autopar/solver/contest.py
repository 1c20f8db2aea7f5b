"""The file format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl).

One JSON document, plain or compressed by gzip:

    {"problem": {"name": ..., "usage_limit": bytes,
                 "nodes": {"intervals": [[start, stop], ...], "costs": [[...], ...], "usages": [[...], ...]},
                 "edges": {"nodes": [[u, v], ...], "costs": [[...], ...]}}}

Intervals are half-open; an edge's costs are row-major over (strategies of u, of v); 10^18 and more is forbidden. Large
programs repeat few tables many times: equal text is parsed once and its array shared.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from autopar.solver.problem import Array, ChoiceProblem, Edge, Node, ProblemError, Usage

#: Costs of so much and more are forbidden.
FORBIDDEN = 10**18
_GZIP = b"\x1f\x8b"


class _Nodes(msgspec.Struct):
    intervals: list[tuple[int, int]]
    costs: list[msgspec.Raw]
    usages: list[msgspec.Raw]


class _Edges(msgspec.Struct):
    nodes: list[tuple[int, int]]
    costs: list[msgspec.Raw]


class _Problem(msgspec.Struct):
    nodes: _Nodes
    edges: _Edges
    usage_limit: float | None = None
    name: str = ""


class _File(msgspec.Struct):
    problem: _Problem


def read_contest(path: str | Path) -> ChoiceProblem:
    """The problem in a file of the contest's format, plain or compressed by gzip.

    Raises:
        ProblemError: where the file is not there or not of this format.
    """
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"cannot read {path}: {error}") from error
    return decode_contest(data)


def decode_contest(data: bytes) -> ChoiceProblem:
    """The problem in a document of the contest's format; nodes are named by their numbers.

    Raises:
        ProblemError: where it is not of this format.
    """
    try:
        problem = msgspec.json.decode(data, type=_File).problem
        return _problem(problem)
    except msgspec.MsgspecError as error:
        raise ProblemError(f"this is no problem of the contest's format: {error}") from error


def _problem(problem: _Problem) -> ChoiceProblem:
    nodes, edges = problem.nodes, problem.edges
    if not len(nodes.intervals) == len(nodes.costs) == len(nodes.usages):
        raise ProblemError(
            f"{len(nodes.costs)} nodes have {len(nodes.intervals)} intervals, {len(nodes.usages)} usages"
        )
    if len(edges.nodes) != len(edges.costs):
        raise ProblemError(f"{len(edges.nodes)} edges have {len(edges.costs)} tables")
    rows = _NumberLists()
    costs = [rows.costs(raw) for raw in nodes.costs]
    tables: dict[tuple[Any, ...], Array] = {}
    joined = []
    for (u, v), raw in zip(edges.nodes, edges.costs, strict=True):
        if not (0 <= u < len(costs) and 0 <= v < len(costs)):
            raise ProblemError(f"edge {u}-{v} leaves the {len(costs)} nodes")
        shape = (costs[u].size, costs[v].size)
        key = (bytes(raw), *shape)
        if key not in tables:
            flat = rows.costs(raw)
            if flat.size != math.prod(shape):
                raise ProblemError(f"edge {u}-{v} has {flat.size} costs; its nodes need {shape[0]} times {shape[1]}")
            tables[key] = flat.reshape(shape)
        if u == v:
            costs[u] = costs[u] + np.diagonal(tables[key])
        else:
            joined.append(Edge(u, v, tables[key]))
    usages = tuple(
        Usage(v, start, stop, rows.values(raw))
        for v, ((start, stop), raw) in enumerate(zip(nodes.intervals, nodes.usages, strict=True))
        if start < stop
    )
    listed = tuple(Node(str(v), node_costs) for v, node_costs in enumerate(costs))
    return ChoiceProblem(listed, tuple(joined), usages, problem.usage_limit)


class _NumberLists:
    """Lists of numbers, each text parsed once."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(list[float])
        self._known: dict[bytes, Array] = {}
        self._costs: dict[bytes, Array] = {}

    def values(self, raw: msgspec.Raw) -> Array:
        text = bytes(raw)
        if text not in self._known:
            self._known[text] = np.array(self._decoder.decode(text), dtype=np.float64)
        return self._known[text]

    def costs(self, raw: msgspec.Raw) -> Array:
        """As `values`, with inf for what is forbidden."""
        text = bytes(raw)
        if text not in self._costs:
            values = np.array(self._decoder.decode(text), dtype=np.float64)
            self._costs[text] = np.where(values >= FORBIDDEN, math.inf, values)
        return self._costs[text]


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
