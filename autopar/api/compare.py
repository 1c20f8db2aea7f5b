"""`compare`: plans one function with several strategies under one budget, and ranks their plans. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.api.options import ParallelOptions, as_tuple
from autopar.api.parallel_function import ParallelFunction, parallelize_with
from autopar.api.parallelize import parallelize
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.search.compare import STANDARD, Budget, Budgeted, Comparison, Named, compare_problem, run_trials
from autopar.search.problem import Problem


def compare(
    fn: Callable[..., Any] | Problem,
    *args: Any,
    search: Sequence[Named] = STANDARD,
    time_limit_s: float | None = 60.0,
    steps: int | None = None,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> Comparison:
    """Plans ``fn`` with several strategies under the same budget; runs nothing.

    Args:
        fn: a train step, plain or decorated, or an `autopar.search.Problem`.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`; none for a problem.
        search: names of strategies, or strategies as (name that the table shows, strategy); one name alone may be
            given as it is.
        time_limit_s: seconds that each may search one mesh; None waits.
        steps: choices that each may evaluate on one mesh, where it counts them.
        seeds: strategies that draw numbers search once with each.
        options: those of `autopar.parallelize`, but for ``search``.

    Returns:
        The comparison: ``print`` it, or see `Comparison.ranking`, ``.best`` and ``.trials``.

    Raises:
        TraceError: the function cannot be traced.
        AutoparError: there is no strategy of a name.
    """
    budget = Budget(time_limit_s, steps, as_tuple(seeds))
    if isinstance(fn, Problem):
        return compare_problem(fn, search, budget)
    function = fn if isinstance(fn, ParallelFunction) and not options else parallelize(fn, **options)
    return compare_with(function.function, args, function.options, search, budget)


def compare_with(
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: ParallelOptions,
    search: Sequence[Named],
    budget: Budget,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """`compare` with options and budget as they are; ``say`` is called with a line when a search begins."""

    def planned(strategy: Budgeted) -> Plan:
        return parallelize_with(fn, replace(options, search=strategy, plan=None)).plan(*args)

    trials = run_trials(search, budget, planned, say)
    cluster = options.cluster or Cluster.local()
    names = [t.plan.content.program for t in trials if t.plan is not None]
    return Comparison(names[0] if names else getattr(fn, "__name__", "function"), str(cluster), budget, trials)
