"""Search strategies by name: the built-in ones, entry points, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from autopar.errors import AutoparError
from autopar.errors.names import known_names
from autopar.errors.offers import Call, Interface
from autopar.hooks import NamedRegistry
from autopar.plan import Plan
from autopar.search.alpa import alpa
from autopar.search.baselines import data_parallel, fsdp_tp, megatron, replicated, zero1, zero2, zero3
from autopar.search.manual import manual
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.search.research.methods import beam, evolutionary, exhaustive, mcmc, random, reinforce
from autopar.search.research.slicings import GPipeStrategy, PipeDreamStrategy

#: A search: what is to be planned -> the plan. Raises InfeasiblePlanError where nothing fits. It may say that no plan
#: is faster than `Subproblem.cutoff_s`.
Strategy: TypeAlias = Callable[[Problem], Plan | Bounded]

_INTERFACE = Interface(
    "search strategy",
    rule="a strategy is a function that takes a Problem and returns a Plan",
    remedy='@autopar.search.register("mine") above def mine(problem): return autopar.search.alpa(problem)',
    call=Call(("problem",)),
)

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


def built_in() -> NamedRegistry[Strategy]:
    """A registry in which nothing is registered yet."""
    return NamedRegistry(_BUILT_IN, ENTRY_POINTS, _INTERFACE)


_REGISTRY = built_in()
_ONE_STAGE: tuple[Strategy, ...] = (data_parallel, fsdp_tp, megatron, replicated, zero1, zero2, zero3)


def register(name: str) -> Callable[[Strategy], Strategy]:
    """Decorator: offers a strategy under ``name``, as ``@autopar.search.register("mine")``."""

    def add(strategy: Strategy) -> Strategy:
        _REGISTRY.add(name, strategy)
        return strategy

    return add


def strategies() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return _REGISTRY.names


def strategy_named(name: str) -> Strategy:
    """The strategy called ``name``. Raises AutoparError, with near names, where there is none."""
    strategy = _REGISTRY.find(name)
    if strategy is None:
        raise AutoparError(f"no search strategy is called {name!r}", remedy=known_names(name, _REGISTRY.names))
    return strategy


def check_strategy(strategy: Any) -> None:
    """Raises AutoparError unless ``strategy`` can be called with a problem."""
    _INTERFACE.check(_name_of(strategy), strategy)


def answer_of(strategy: Strategy, problem: Problem) -> Plan | Bounded:
    """The answer of a strategy to a problem. Raises AutoparError where it is no plan."""
    answer = strategy(problem)
    _INTERFACE.check_answer(_name_of(strategy), answer, Plan, Bounded)
    return answer


def _name_of(strategy: Any) -> str:
    """The name of a function, or the class of another object, for messages."""
    return getattr(strategy, "__name__", type(strategy).__name__)


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
