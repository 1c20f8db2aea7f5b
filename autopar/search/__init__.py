"""Strategies from `Problem` to `Plan`."""

from autopar.search.alpa import alpa
from autopar.search.manual import Manual
from autopar.search.problem import Options, Problem
from autopar.search.registry import Strategy, register, strategies, strategy_named

__all__ = ["Manual", "Options", "Problem", "Strategy", "alpa", "register", "strategies", "strategy_named"]
