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
        raise ProblemError(f"this is not a problem in the contest's format: {error}") from error


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
        """The numbers of `values`, with inf for forbidden ones."""
        text = bytes(raw)
        if text not in self._costs:
            values = np.array(self._decoder.decode(text), dtype=np.float64)
            self._costs[text] = np.where(values >= FORBIDDEN, math.inf, values)
        return self._costs[text]
