from __future__ import annotations

import ast
from pathlib import Path

import networkx
from rich.console import Console

from benchmarks import reference
from benchmarks.report import cell, table


def test_paths_are_the_shortest() -> None:
    nodes, edges = 3000, 12000
    drawn = reference._numbers(1, 3 * edges)
    graph = networkx.DiGraph()
    for a, b, length in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True):
        edge = (a % nodes, b % nodes)
        least = min(length % 1000, graph.edges[edge]["weight"]) if graph.has_edge(*edge) else length % 1000
        graph.add_edge(*edge, weight=least)
    assert reference._paths(1) == sum(networkx.single_source_dijkstra_path_length(graph, 0).values())


def test_the_work_is_the_same_each_time_and_knows_nothing_of_autopar() -> None:
    assert reference.work(1) == reference.work(1) != reference.work(2)
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any(name and name.startswith("autopar") for name in imported)
    assert reference.seconds(1, 1) > 0


def test_measured_seconds_are_also_multiples() -> None:
    rows = ({"cpu_s": 3.0, "step_s": 3.0}, {"cpu_s": None, "step_s": 1.0})
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table("t", rows, ("cpu_s",), 1.5))
    text = captured.get()
    assert text.count("ref)") == 1 and "3.000 s (2 ref)" in text


def test_a_cell_may_have_numbers_by_name() -> None:
    assert cell("phases", {"trace": 0.25, "solves": [3, 0.5]}) == "trace 0.250, solves 3 0.500"
