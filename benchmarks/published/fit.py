"""Fits the constants of stacks, kernels and networks to the fitted part of the published runs.

``python -m benchmarks.published.fit`` minimizes the logarithm of predicted over measured step time, with a loss that
grows linearly for outliers; every dataset has a weight of its own so that the large ones do not decide alone. It is
deterministic, and writes what it finds into ``cost_models/training/constants.toml``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import least_squares

from autopar.cost.constants import constants_file
from benchmarks.published.collectives import reductions
from benchmarks.published.dataset import POINTS, Run, load
from benchmarks.published.free import FREE, NETWORK, Free, value_of, with_values
from benchmarks.published.score import make_bills, ranking, score
from benchmarks.published.transformer import Constants, load_constants
from benchmarks.report import Row, table

#: Weighted errors as a function of the logarithms of constants.
Residuals: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]


#: Weight of the prior: a constant that is off by a factor of e counts as a run that is off by this.
_PRIOR = 0.03
#: Times that derivatives are computed, from the priors and from a fit to nearly the same runs; evaluations in between;
#: the change of a logarithm below which a fit has settled; the change that derivatives are taken over.
_REFRESHES, _FEWER_REFRESHES, _STEPS, _SETTLED, _DIFFERENCE = 8, 3, 10, 1e-2, 1e-3


def fitted_runs(runs: Sequence[Run], most: int) -> tuple[Run, ...]:
    """Timed runs of the fitted part, at most so many of a dataset, evenly out of all."""
    timed = [r for r in runs if r.fitted and r.measured_s is not None]
    chosen: list[Run] = []
    for dataset in dict.fromkeys(r.dataset for r in timed):
        of_it = [r for r in timed if r.dataset == dataset]
        count = min(most, len(of_it))
        chosen += [of_it[i * len(of_it) // count] for i in range(count)]
    return tuple(chosen)


def weight(run: Run, sizes: dict[str, int]) -> float:
    """The square root of a dataset's share: those of more runs count more, though not in proportion."""
    return math.sqrt(sizes[run.dataset] ** 0.5 / sizes[run.dataset])


def fit_network(constants: Constants, free: Sequence[Free]) -> Fitted:
    """The constants that are nearest to the measured all-reduces."""
    rows = [r for r in reductions() if r.fitted]

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = with_values(constants, free, np.exp(x).tolist())
        return np.array([math.log(1 + r.error(changed)) for r in rows])

    return _least(residuals, constants, free, len(rows), np.log([f.prior for f in free]), _REFRESHES)


@dataclass(frozen=True)
class Fitted:
    """Constants and how sure they are.

    Args:
        constants: with the values found.
        factors: of each that was free, the factor either way that 95 of 100 fits would lie within.
        points: measurements that were fitted.
    """

    constants: Constants
    factors: tuple[float, ...]
    points: int


class Errors:
    """Logarithms of predicted over measured seconds of runs, each computed once for the constants it depends on.

    Args:
        constants: the others.
        runs: what ran.
        free: constants that vary.
    """

    def __init__(self, constants: Constants, runs: Sequence[Run], free: Sequence[Free]) -> None:
        self.constants, self.runs, self.free = constants, tuple(runs), tuple(free)
        self.relevant = [[n for n, f in enumerate(free) if _touches(f, run)] for run in runs]
        self.known: dict[tuple[int, tuple[float, ...]], float] = {}

    def at(self, x: NDArray[np.float64], chosen: Sequence[int]) -> NDArray[np.float64]:
        """Errors of some of the runs where the constants have the logarithms ``x``."""
        keys = [(n, tuple(float(x[k]) for k in self.relevant[n])) for n in chosen]
        missing = [key for key in keys if key not in self.known]
        if missing:
            changed = with_values(self.constants, self.free, np.exp(x).tolist())
            for key, scored in zip(missing, score([self.runs[n] for n, _ in missing], changed), strict=True):
                self.known[key] = math.log(1 + scored.error)
        return np.array([self.known[key] for key in keys])


def _touches(free: Free, run: Run) -> bool:
    """Whether a run's prediction depends on a constant."""
    return any(not table.startswith("stacks.") or table == f"stacks.{run.stack}" for table in free.tables)


def fit(constants: Constants, runs: Sequence[Run], free: Sequence[Free]) -> Fitted:
    """The constants that are nearest to the runs, and to their priors where the runs say nothing."""
    errors = Errors(constants, runs, free)
    return fit_some(errors, range(len(errors.runs)), np.log([f.prior for f in free]), _REFRESHES)


def fit_some(errors: Errors, chosen: Sequence[int], start: NDArray[np.float64], refreshes: int) -> Fitted:
    """`fit` to some of the runs of ``errors``.

    Args:
        errors: of the runs.
        chosen: numbers of those that are fitted.
        start: logarithms of the constants to begin from.
        refreshes: how often derivatives are computed at most: the steps between use those of the last time.
    """
    runs, free = [errors.runs[n] for n in chosen], errors.free
    sizes = {d: sum(r.dataset == d for r in runs) for d in sorted({r.dataset for r in runs})}
    weights = np.array([weight(r, sizes) for r in runs])
    prior = np.log([f.prior for f in free])

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([weights * errors.at(x, chosen), _PRIOR * (x - prior)])

    return _least(residuals, errors.constants, free, len(runs), start, refreshes)


def _least(
    residuals: Residuals,
    constants: Constants,
    free: Sequence[Free],
    points: int,
    start: NDArray[np.float64],
    refreshes: int,
) -> Fitted:
    """The constants of least residuals, which are functions of their logarithms."""
    low, high = np.log([f.low for f in free]), np.log([f.high for f in free])
    x, found = start, None
    for _ in range(refreshes):
        slopes = _slopes(residuals, x, high)
        found = least_squares(
            residuals, x, jac=lambda _, slopes=slopes: slopes, bounds=(low, high), loss="soft_l1", f_scale=0.05,
            max_nfev=_STEPS, xtol=1e-4,
        )  # fmt: skip
        moved = float(np.max(np.abs(found.x - x)))
        x = found.x
        if moved < _SETTLED:
            break
    assert found is not None
    variance = 2 * found.cost / max(1, len(found.fun) - len(free))
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(slopes.T @ slopes)))
    changed = with_values(constants, free, [float(f"{v:.3g}") for v in np.exp(x)])
    return Fitted(changed, tuple(np.exp(1.96 * errors).tolist()), points)


def _slopes(residuals: Residuals, x: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """Derivatives by finite differences, away from upper bounds."""
    at = residuals(x)
    columns = []
    for n in range(len(x)):
        step = _DIFFERENCE if x[n] + _DIFFERENCE <= high[n] else -_DIFFERENCE
        moved = x.copy()
        moved[n] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1)


def left_out(constants: Constants, runs: Sequence[Run], most: int) -> dict[str, Constants]:
    """By dataset the constants that are fitted to the other datasets alone.

    Args:
        constants: the others, of networks.
        runs: of all datasets.
        most: runs of a dataset that are fitted.
    """
    timed = [r for r in runs if r.measured_s is not None]
    errors = Errors(constants, fitted_runs([replace(r, fitted=True) for r in timed], most), FREE)
    # Each fit begins where that to all runs ends, whose derivatives hold for all of them; then it has its own.
    whole = fit_some(errors, range(len(errors.runs)), np.log([f.prior for f in FREE]), _REFRESHES).constants
    start = np.log([value_of(whole, f) for f in FREE])
    found: dict[str, Constants] = {}
    for dataset in dict.fromkeys(r.dataset for r in timed):
        others = [n for n, r in enumerate(errors.runs) if r.dataset != dataset]
        found[dataset] = fit_some(errors, others, start, _FEWER_REFRESHES).constants
    return found


def leave_one_out(constants: Constants, runs: Sequence[Run], most: int) -> tuple[Row, ...]:
    """Errors by bill of each dataset, and of each stack, with the constants of `left_out`."""
    rows: list[Row] = []
    for dataset, changed in left_out(constants, runs, most).items():
        scored = score([r for r in runs if r.dataset == dataset and r.measured_s is not None], changed)
        found = ranking([(s.run, s.prediction.step_s) for s in scored])
        rows.append(
            {
                "dataset": dataset,
                "stack": ", ".join(sorted({s.run.stack for s in scored})),
                "runs": len(scored),
                "mean": statistics.mean(abs(s.error) for s in scored),
                "bias": statistics.mean(s.error for s in scored),
                "rank": found.correlation if found else None,
                "regret": found.regret if found else None,
            }
        )
    return (*rows, *_means(rows))


def _means(rows: Sequence[Row]) -> Iterator[Row]:
    """Means over the datasets of each stack, then over all; regret over those that have one."""
    for stack in (*sorted({r["stack"] for r in rows}), None):
        of_it = [r for r in rows if stack in (None, r["stack"])]
        regrets = [r["regret"] for r in of_it if r["regret"] is not None]
        yield {
            "dataset": f"{len(of_it)} of them",
            "stack": stack or "all",
            "runs": sum(r["runs"] for r in of_it),
            **{name: statistics.mean(r[name] for r in of_it) for name in ("mean", "bias")},
            "rank": None,
            "regret": statistics.mean(regrets) if regrets else None,
        }


def write(fitted: Fitted, free: Sequence[Free]) -> None:
    """Writes the fitted constants into the file, leaving comments of their own and other keys as they are."""
    path = constants_file()
    lines, table = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[([\w.-]+)\]", line.strip())
        table = header.group(1) if header else table
        key = line.partition("=")[0].strip()
        for f, factor in zip(free, fitted.factors, strict=True):
            if table in f.tables and f.key == key:
                value = f"{value_of(fitted.constants, f):.3g}"
                line = f"{key} = {value}  # fit: {fitted.points} points, 95% within a factor of {factor:.3g}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@click.command()
@click.option("--dry", is_flag=True, help="Print the constants, do not write them.")
@click.option("--leave-one-out", "each", is_flag=True, help="Fit to all but one dataset in turn; score it by bill.")
@click.option("--most", default=30, show_default=True, help="Runs of a dataset that are fitted.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=POINTS)
def main(dry: bool, each: bool, most: int, file: Path) -> None:
    """Fits and writes the constants."""
    runs = load(file)
    click.echo(f"{make_bills(runs)} bills were missing and are made", err=True)
    network = fit_network(load_constants(), NETWORK)
    chosen = fitted_runs([replace(r, fitted=True) for r in runs] if each else runs, most)
    timed = sum(r.measured_s is not None for r in runs)
    click.echo(
        f"fitted to {len(chosen)} of {timed} timed runs, at most {most} of a dataset, evenly out of all", err=True
    )
    if each:
        Console(width=160).print(table("leave one dataset out", leave_one_out(network.constants, runs, most)))
        return
    fitted = fit(network.constants, chosen, FREE)
    for of, free in ((network, NETWORK), (fitted, FREE)):
        for f, factor in zip(free, of.factors, strict=True):
            click.echo(f"{f.table}.{f.key} = {value_of(of.constants, f):.4g}, within a factor of {factor:.3g}")
        if not dry:
            write(of, free)


if __name__ == "__main__":
    main()
