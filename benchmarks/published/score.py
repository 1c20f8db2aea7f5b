"""Predictions of runs, and how far they are from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autopar.cluster import Cluster
from benchmarks.published.dataset import Run
from benchmarks.published.kept import make_missing
from benchmarks.published.plans import shape_of, stage_cluster
from benchmarks.published.priced import StepPrediction, predict_plan
from benchmarks.published.transformer import Constants, TrainingPlan, TransformerSpec

#: (model, plan, cluster, constants, name of the stack) -> seconds and bytes of a step.
Model: TypeAlias = Callable[[TransformerSpec, TrainingPlan, Cluster, Constants, str], StepPrediction]


@dataclass(frozen=True)
class Scored:
    """A run with its prediction."""

    run: Run
    prediction: StepPrediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        assert self.run.measured_s is not None
        return self.prediction.step_s / self.run.measured_s - 1


def score(runs: Iterable[Run], constants: Constants, model: Model = predict_plan) -> tuple[Scored, ...]:
    """Each run with the prediction of its plan, or of the best of its plans.

    Args:
        runs: what ran.
        constants: of kernels, networks and stacks.
        model: prices a plan.
    """
    return tuple(Scored(run, _best(run, constants, model)) for run in runs)


def make_bills(runs: Iterable[Run]) -> int:
    """Makes the bills of all plans of runs that are not on disk, on all processors; returns how many."""
    shapes = ((shape_of(run.spec, plan), run.cluster) for run in runs for plan in run.plans)
    return make_missing((shape, stage_cluster(cluster, shape.tp * shape.cp)) for shape, cluster in shapes)


def _best(run: Run, constants: Constants, model: Model) -> StepPrediction:
    made = [model(run.spec, plan, run.cluster, constants, run.stack) for plan in run.plans]
    return min(made, key=lambda p: (not p.fits, p.step_s))


@dataclass(frozen=True)
class Ranking:
    """How well plans of one model on one cluster are told apart.

    Args:
        correlation: Spearman's, the mean over groups weighted by their runs.
        regret: how much slower the plan predicted fastest was measured than the fastest, the mean over groups.
        groups: number of groups.
    """

    correlation: float
    regret: float
    groups: int


def ranking(predicted: Sequence[tuple[Run, float]], least: int = 4) -> Ranking | None:
    """The ranking inside groups of ``least`` runs or more; None where there is no such group.

    Args:
        predicted: runs with the predicted seconds of their steps.
        least: runs of a group.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for run, step_s in predicted:
        if run.measured_s is not None:
            groups.setdefault(run.group, []).append((step_s, run.measured_s))
    ranked = [g for _, g in sorted(groups.items()) if len(g) >= least]
    if not ranked:
        return None
    correlations, weights, regrets = [], [], []
    for group in ranked:
        measured = [s for _, s in group]
        correlations.append(rank_correlation([s for s, _ in group], measured))
        weights.append(len(group))
        regrets.append(min(group, key=lambda g: g[0])[1] / min(measured) - 1)
    mean = sum(c * w for c, w in zip(correlations, weights, strict=True)) / sum(weights)
    return Ranking(mean, statistics.mean(regrets), len(ranked))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's correlation, where equal numbers have their mean rank; 0 where all numbers of one are equal."""
    ranks = [np.searchsorted(np.sort(x), x, "left") + np.searchsorted(np.sort(x), x, "right") for x in (a, b)]
    if any(len(set(r.tolist())) == 1 for r in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
