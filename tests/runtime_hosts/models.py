"""Models trained by processes that each carry out their workers' lists, next to one device and to one process.

Rows of a covering array: every pair of values of two factors (model, schedule, workers, mesh, microbatches,
recomputation, donation) is in some row. The leaves of a row after five steps are within 1e-10 of one device's.
They equal those of the lists in one process to the bit, where that process has gloo too (XLA's own collectives add
up in another order) and plans for as many nodes: a mesh that spans two has another plan.
``python -m tests.runtime_hosts.models --processes 2`` carries the rows out, a line for each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import click

from tests.runtime_hosts.launch import results, run

DEVICES = 8
WORST = 1e-10
WITHOUT_FLUSH = ("2bw", "pipedream")
TWO_STAGES_A_WORKER = ("interleaved", "zb-v")
#: Without a flush no update reads values of other stages: no tied tables, no clipping by a norm of all gradients.
APART: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"gpt": {"tied": False, "clip": None}, "llama": {}, "encoder_decoder": {"tied": False}}
)
#: Batches that eight microbatches on two devices cut evenly, and layers for each stage.
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt": {"batch": 16, "layers": 4},
        "llama": {"batch": 16, "layers": 4},
        "moe": {"batch": 16, "layers": 4},
        "encoder_decoder": {},
    }
)
FACTORS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "model": tuple(SIZES),
        "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", *WITHOUT_FLUSH),
        "workers": (2, 4),
        "mesh": ("dp", "dp x tp"),
        "microbatches": (4, 8),
        "recompute": ("none", "full"),
        "donate": (False, True),
    }
)
#: A value for each factor.
Row: TypeAlias = Mapping[str, Any]


def is_possible(row: Row) -> bool:
    """Whether there is such a plan: enough layers for all stages, and a batch that its devices share evenly."""
    chunked, unflushed = row["schedule"] in TWO_STAGES_A_WORKER, row["schedule"] in WITHOUT_FLUSH
    if chunked and row["workers"] == 4:
        return False  # eight stages
    dp = DEVICES // row["workers"] // (2 if row["mesh"] == "dp x tp" else 1)
    if 16 // row["microbatches"] % dp or (row["workers"] == 4 and row["mesh"] == "dp x tp" and dp > 1):
        return False
    return not (unflushed and (row["donate"] or row["recompute"] == "full" or row["model"] not in APART))


def pairs_of(row: Row) -> frozenset[tuple[str, Any, str, Any]]:
    """All pairs of values of a row."""
    return frozenset((a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2))


def array(seed: int) -> tuple[Row, ...]:
    """Rows that together have every pair of values that a possible row has; drawn, the same for a seed."""
    draw = random.Random(seed)
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    possible = [row for row in every if is_possible(row)]
    draw.shuffle(possible)
    left = set[tuple[str, Any, str, Any]]().union(*map(pairs_of, possible))
    rows: list[Row] = []
    while left:
        best = max(possible, key=lambda row: len(left & pairs_of(row)))
        rows.append(best)
        left -= pairs_of(best)
    return tuple(rows)


def case_of(row: Row) -> dict[str, Any]:
    """The row as options of `autopar.parallelize`, as `tests.runtime_hosts.programs` takes them."""
    chunks, each = (2 if row["schedule"] in TWO_STAGES_A_WORKER else 1), DEVICES // row["workers"]
    tp = 2 if row["mesh"] == "dp x tp" else 1
    manual: dict[str, Any] = {"pp": row["workers"], "dp": each // tp, "tp": tp, "chunks": chunks}
    if row["recompute"] == "full":
        manual["recompute"] = "full"
    return {
        "manual": {k: v for k, v in manual.items() if v != 1 or k == "dp"},
        "num_stages": row["workers"] * chunks,
        "num_microbatches": row["microbatches"],
        "schedule": row["schedule"],
        **({"donate_argnums": [0]} if row["donate"] else {}),
    }


def program_of(row: Row) -> tuple[str, dict[str, Any]]:
    """Name and options of the program that carries a row out."""
    options: dict[str, Any] = {"example": row["model"], "sizes": dict(SIZES[row["model"]])}
    case = case_of(row)
    if row["schedule"] in WITHOUT_FLUSH:
        options["sizes"] |= APART[row["model"]]
        return "without_flush", {**options, **case}
    return "train", {**options, "cases": [case]}


def found(rows: Sequence[Row], processes: int, limit_s: float = 1700.0) -> list[dict[str, Any]]:
    """By row how far the leaves are from one device's, and whether they are equal to the bit to one process's."""
    programs = [program_of(row) for row in rows]
    options: dict[str, Any] = {"programs": programs, "limit_s": limit_s}
    worlds = results(run("several", processes, devices=DEVICES // processes, parts=True, **options))
    assert all(world == worlds[0] for world in worlds), "processes differ"
    (alone,) = results(run("several", 1, devices=DEVICES, gloo=True, parts=False, nodes=processes, **options))
    outcomes = []
    for row, (name, _), one, other in zip(rows, programs, worlds[0], alone, strict=True):
        one, other = (one[0], other[0]) if name == "train" else (one, other)
        key = "digest" if name == "train" else "digests"
        outcomes.append({**row, "worst": one["worst"], "equal": one[key] == other[key]})
    return outcomes


@click.command()
@click.option("--processes", default=2, help="That carry the rows out: 2 or 4.")
@click.option("--seed", default=0, help="Of the array.")
@click.option("--first", default=0, help="Number of the first row.")
@click.option("--rows", "count", default=1000, help="How many.")
def main(processes: int, seed: int, first: int, count: int) -> None:
    """Carries rows out, four at a time; exits with 1 if one is not as it should be."""
    rows = array(seed)
    click.echo(f"{len(rows)} rows have every pair")
    wrong = 0
    for at in range(first, min(first + count, len(rows)), 4):
        for number, one in enumerate(found(rows[at : min(at + 4, first + count)], processes), at):
            is_right = one["worst"] < WORST and one["equal"]
            wrong += not is_right
            click.echo(f"{number} {'right' if is_right else 'WRONG'} {one}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
