"""``python -m benchmarks.published``: every published point by the plan that a user gets, next to its bill.

A point is the traced example at its size, `Manual` with its degrees, and the stack that ran (`planned`). All of them
take about an hour of a core; ``--most N`` draws N of each dataset by a seed, in whole groups of one model and cluster,
so that plans can be ranked. With ``--leave-one-out`` those of a dataset are priced with constants that are fitted,
through bills, to the other datasets alone. Points that neither an example nor `Manual` can say are listed with the
reason.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from autopar.cost.constants import Constants
from autopar.errors import AutoparError
from benchmarks.published.dataset import Run, load
from benchmarks.published.fit import fit_network, left_out
from benchmarks.published.free import NETWORK
from benchmarks.published.planned import NamedRun, refusal
from benchmarks.published.score import make_bills, ranking, score
from benchmarks.published.transformer import load_constants
from benchmarks.report import Row, table

SEED = 20261128


def drawn(runs: Sequence[Run], most: int, seed: int) -> list[Run]:
    """About ``most`` of the timed ``runs`` of each dataset, in whole groups; all where ``most`` is 0.

    Args:
        runs: of all datasets.
        most: groups are taken until there are so many; of the last no more than that leaves.
        seed: of the order of groups.
    """
    by_dataset: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if run.measured_s is not None:
            by_dataset.setdefault(run.dataset, {}).setdefault(run.group, []).append(run)
    chosen: list[Run] = []
    for dataset, groups in by_dataset.items():
        order = sorted(groups)
        random.Random(f"{seed}/{dataset}").shuffle(order)
        every = [run for group in order for run in groups[group]]
        chosen += every[: most or len(every)]
    return chosen


def row(run: Run, constants: Constants) -> Row:
    """A point by its plan and by its bill, both with ``constants``; ``why`` says why it has no plan."""
    assert run.measured_s is not None
    began_s = time.process_time()
    made: dict[str, Any] = {
        "point": run.point,
        "dataset": run.dataset,
        "measured_s": run.measured_s,
        "why": refusal(run),
    }
    try:
        made["plan_s"] = None if made["why"] else NamedRun.of(run, constants).step_s()
    except (AutoparError, ValueError) as error:
        made |= {"plan_s": None, "why": str(error).partition("\n")[0]}
    made["planning, CPU s"] = time.process_time() - began_s
    try:
        made["bill_s"] = score([run], constants)[0].prediction.step_s
    except (AutoparError, ValueError):
        made["bill_s"] = None
    return made


def by_dataset(rows: Sequence[Row], runs: Sequence[Run]) -> Iterator[Row]:
    """Errors, ranks and regrets of each dataset by plan and by bill, over points that have both; means over datasets.

    Args:
        rows: of `row`.
        runs: the same points, in the same order.
    """
    every: list[dict[str, Any]] = []
    for dataset in dict.fromkeys(r["dataset"] for r in rows):
        both = [
            (run, r)
            for run, r in zip(runs, rows, strict=True)
            if r["dataset"] == dataset and r["plan_s"] is not None and r["bill_s"] is not None
        ]
        if not both:
            continue
        made: dict[str, Any] = {"dataset": dataset, "points": len(both)}
        for door in ("plan", "bill"):
            errors = [r[f"{door}_s"] / r["measured_s"] - 1 for _, r in both]
            ranks = ranking([(run, r[f"{door}_s"]) for run, r in both])
            made[f"{door}: mean"] = statistics.mean(map(abs, errors))
            made[f"{door}: bias"], made[f"{door}: worst"] = statistics.mean(errors), max(errors, key=abs)
            made[f"{door}: rank"] = ranks.correlation if ranks else None
            made[f"{door}: regret"] = ranks.regret if ranks else None
        made["CPU s"] = sum(r["planning, CPU s"] for _, r in both)
        every.append(made)
    yield from every
    means: dict[str, Any] = {"dataset": "mean over datasets", "points": sum(r["points"] for r in every)}
    for key in every[0] if every else ():
        given = [r[key] for r in every if r[key] is not None]
        if key not in means and given:
            means[key] = sum(given) if key == "CPU s" else statistics.mean(given)
    yield means


@click.command()
@click.option("--most", default=0, show_default=True, help="About so many points of each dataset; 0: all.")
@click.option("--seed", default=SEED, show_default=True, help="Of the draw.")
@click.option("--leave-one-out", "each", is_flag=True, help="Constants are fitted to the other datasets.")
@click.option("--fitted", default=12, show_default=True, help="Runs of a dataset that --leave-one-out fits.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A line of JSON for each point.")
@click.argument("datasets", nargs=-1)
def main(most: int, seed: int, each: bool, fitted: int, out: Path | None, datasets: tuple[str, ...]) -> None:
    """Plans the points of all DATASETS, or of those whose names begin so."""
    every = load()
    runs = [r for r in drawn(every, most, seed) if not datasets or r.dataset.startswith(datasets)]
    click.echo(f"{make_bills(every if each else runs)} bills were missing and are made", err=True)
    known = load_constants()
    constants = left_out(fit_network(known, NETWORK).constants, every, fitted) if each else {}
    rows: list[Row] = []
    for run in runs:
        rows.append(row(run, constants.get(run.dataset, known)))
        click.echo(rows[-1], err=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")
    title = "published points by plan and by bill" + (", each dataset left out" if each else "")
    Console(width=200).print(table(title, tuple(by_dataset(rows, runs))))
    for (dataset, why), count in sorted(Counter((r["dataset"], r["why"]) for r in rows if r["why"]).items()):
        click.echo(f"{count} of {dataset} without a plan: {why}")


if __name__ == "__main__":
    main()
