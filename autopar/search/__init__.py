"""Strategies from `Problem` to `Plan`."""

from autopar.search.alpa import alpa
from autopar.search.manual import Manual
from autopar.search.problem import Options, Problem
from autopar.search.progress import Progress
from autopar.search.registry import Strategy, cuts_stages, register, strategies, strategy_named

__all__ = [
    "Manual",
    "Options",
    "Problem",
    "Progress",
    "Strategy",
    "alpa",
    "cuts_stages",
    "register",
    "strategies",
    "strategy_named",
]
