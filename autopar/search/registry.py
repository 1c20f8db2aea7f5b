"""Search strategies by name: the built-in ones, entry points, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TypeAlias

from autopar.errors import AutoparError
from autopar.errors.names import known_names
from autopar.plan import Plan
from autopar.search.alpa import alpa
from autopar.search.baselines import data_parallel, fsdp_tp, megatron, replicated, zero1, zero2, zero3
from autopar.search.manual import manual
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.search.research.beam import beam
from autopar.search.research.evolutionary import evolutionary
from autopar.search.research.exhaustive import exhaustive
from autopar.search.research.gpipe import GPipeStrategy
from autopar.search.research.mcmc import mcmc
from autopar.search.research.pipedream import PipeDreamStrategy
from autopar.search.research.random import random
from autopar.search.research.reinforce import reinforce

#: A search: what is to be planned -> the plan. Raises InfeasiblePlanError where nothing fits. It may say that no plan
#: is faster than `Subproblem.cutoff_s`.
Strategy: TypeAlias = Callable[[Problem], Plan | Bounded]

#: Group of entry points under which other packages offer strategies.
ENTRY_POINTS = "autopar.strategies"

_BUILT_IN: Mapping[str, Strategy] = MappingProxyType(
    {
        "alpa": alpa,
        "beam": beam,
        "data-parallel": data_parallel,
        "evolutionary": evolutionary,
        "exhaustive": exhaustive,
        "gpipe": GPipeStrategy(),
        "manual": manual,
        "mcmc": mcmc,
        "fsdp-tp": fsdp_tp,
        "megatron": megatron,
        "pipedream": PipeDreamStrategy(),
        "random": random,
        "reinforce": reinforce,
        "replicated": replicated,
        "zero1": zero1,
        "zero2": zero2,
        "zero3": zero3,
    }
)


class StrategyRegistry:
    """Strategies that users add; they hide built-in ones of the same name."""

    def __init__(self) -> None:
        self._added: dict[str, Strategy] = {}

    def add(self, name: str, strategy: Strategy) -> None:
        """Use ``strategy`` for ``name`` from now on."""
        self._added[name] = strategy

    def known(self) -> Mapping[str, Strategy]:
        """Names that need no look at installed packages, which takes 5 ms."""
        return {**_BUILT_IN, **self._added}

    def table(self) -> dict[str, Strategy | None]:
        """Every name; None where an entry point is not loaded yet."""
        installed: dict[str, Strategy | None] = {p.name: None for p in entry_points(group=ENTRY_POINTS)}
        return dict(sorted({**installed, **self.known()}.items()))


_REGISTRY = StrategyRegistry()
_ONE_STAGE: tuple[Strategy, ...] = (data_parallel, fsdp_tp, megatron, replicated, zero1, zero2, zero3)


def register(name: str) -> Callable[[Strategy], Strategy]:
    """Decorator: offers a strategy under ``name``, as ``@autopar.search.register("mine")``."""

    def add(strategy: Strategy) -> Strategy:
        _REGISTRY.add(name, strategy)
        return strategy

    return add


def strategies() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return tuple(_REGISTRY.table())


def strategy_named(name: str) -> Strategy:
    """The strategy called ``name``. Raises AutoparError, with near names, where there is none."""
    if name in (known := _REGISTRY.known()):
        return known[name]
    table = _REGISTRY.table()
    if name not in table:
        raise AutoparError(f"no search strategy is called {name!r}", remedy=known_names(name, table))
    strategy = table[name]
    if strategy is None:
        (point,) = (p for p in entry_points(group=ENTRY_POINTS) if p.name == name)
        strategy = point.load()
    return strategy


def cuts_stages(strategy: Strategy) -> bool:
    """Whether a strategy cuts the step into stages itself: it has a true attribute ``cuts_stages``.

    Such a strategy is given the whole problem with its source; of others the search of pipelines makes stages.
    """
    return bool(getattr(strategy, "cuts_stages", False))


def names_one_stage(strategy: Strategy) -> bool:
    """Whether a strategy names a plan of one mesh, which has several stages only where their number is asked for."""
    return strategy in _ONE_STAGE


def names_plan(strategy: Strategy) -> bool:
    """Whether a strategy names a plan, so that hosts compute nothing that it does not name.

    Args:
        strategy: one of a name, or one with a true attribute ``names_plan``.
    """
    return names_one_stage(strategy) or bool(getattr(strategy, "names_plan", False))
