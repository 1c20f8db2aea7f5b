"""`autopar solve` on instances of the ASPLOS/EuroSys 2025 contest, each in a process of its own, reading included.

The instances are not part of this repository: they are in github.com/google/iopddl. ``--data`` names a folder with
files ``*-LETTER.json`` or ``*-LETTER.json.gz`` and, to compare with, ``contest_results.csv``: a row a team with its
cost by letter, the winner's first. Costs and memory are evaluated here from the file, in whole numbers.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.report import Report, Row, Say

#: Seconds that the contest gave, reading included; 60 for letters that are not here.
LIMITS_S: Mapping[str, float] = MappingProxyType(
    {"A": 60, "B": 60, "C": 60, "G": 120, "K": 180, "M": 180, "N": 180, "S": 240, "V": 300}
)
QUICK_S = 4.0
FORBIDDEN = 10**18
TARGET = "feasible within the time limit, sum of best/cost at least the winner's"


def evaluate(problem: Mapping[str, Any], solution: Sequence[int]) -> int | None:
    """Cost of a solution by the contest's definition; None where it exceeds the limit or takes what is forbidden."""
    nodes, edges = problem["nodes"], problem["edges"]
    if len(solution) != len(nodes["costs"]):
        return None
    terms = [costs[k] for costs, k in zip(nodes["costs"], solution, strict=True)]
    for (u, v), costs in zip(edges["nodes"], edges["costs"], strict=True):
        terms.append(costs[solution[u] * len(nodes["costs"][v]) + solution[v]])
    change: dict[int, int] = {}
    for (start, stop), usages, k in zip(nodes["intervals"], nodes["usages"], solution, strict=True):
        if start < stop:
            change[start] = change.get(start, 0) + usages[k]
            change[stop] = change.get(stop, 0) - usages[k]
    held = most = 0
    for at in sorted(change):
        held += change[at]
        most = max(most, held)
    fits = most <= problem["usage_limit"] and max(terms) < FORBIDDEN
    return sum(terms) if fits else None


def files(data: Path) -> dict[str, Path]:
    """Instances of a folder by letter."""
    found = sorted([*data.glob("*-?.json"), *data.glob("*-?.json.gz")])
    return {path.name.partition(".")[0][-1]: path for path in found}


def results(data: Path) -> list[dict[str, int]]:
    """Costs of the teams by letter, the winner's first; empty without the file."""
    path = data / "contest_results.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return [{k: int(v) for k, v in row.items() if k != "team" and v} for row in csv.DictReader(lines)]


def measure(path: Path, limit_s: float, seed: int) -> Row:
    """The row of an instance."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "solution.json"
        command = [sys.executable, "-m", "autopar", "solve", str(path), "--time-limit", str(limit_s),
                   "--seed", str(seed), "-o", str(output), "-q", "--format", "json"]  # fmt: skip
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        answer = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"solution": []}
    data = path.read_bytes()
    problem = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["problem"]
    cost = evaluate(problem, answer["solution"])
    return {
        "nodes": len(problem["nodes"]["costs"]),
        "limit": f"{limit_s:.0f} s",
        "cost": cost,
        "bound": answer.get("bound"),
        "gap": answer.get("gap"),
        "time_s": seconds,
        "peak_rss_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "in time": seconds <= limit_s,
    }


def run(quick: bool, say: Say, data: Path | None = None, letters: str = "", seed: int = 0) -> Report:
    """The benchmark.

    Args:
        quick: give each instance 4 s.
        say: told what is going on.
        data: folder of the instances.
        letters: of the instances; all of the folder where empty.
        seed: of the solver.
    """
    if data is None:
        note = "not run: it needs --data DIR with the contest's instances (github.com/google/iopddl)"
        return Report("contest", TARGET, (), True, (note,))
    found, teams = files(data), results(data)
    rows: list[Row] = []
    ours = winners = 0.0
    passed = True
    for letter in sorted(set(letters) or found):
        limit_s = QUICK_S if quick else LIMITS_S.get(letter, 60.0)
        say(f"contest: {letter}, at most {limit_s:.0f} s")
        row = dict(measure(found[letter], limit_s, seed))
        known = [team[letter] for team in teams if 0 < team.get(letter, 0) < FORBIDDEN]
        passed = passed and row["cost"] is not None and row["in time"]
        if known:
            # The best of all teams, or ours where it is better: nobody gets more than 1.
            best = min(known)
            row["best/cost"] = best / row["cost"] if row["cost"] else 0.0
            row["winner's best/cost"] = best / teams[0][letter]
            ours, winners = ours + min(row["best/cost"], 1.0), winners + row["winner's best/cost"]
        for name in ("best/cost", "winner's best/cost", "gap"):
            row[name] = None if row.get(name) is None else f"{row[name]:.5f}"
        rows.append({"instance": letter, **row})
    notes = (
        f"sum of best/cost, none above 1: {ours:.5f}; the winner's: {winners:.5f}",
        "best: of all teams of the contest",
    )
    return Report("contest", TARGET, tuple(rows), passed and ours >= winners, notes, measured=("time_s",))
