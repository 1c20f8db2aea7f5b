"""Strategies from `Problem` to `Plan`."""

from autopar.plan import Plan
from autopar.search.alpa import alpa
from autopar.search.compare import Budget, Comparison
from autopar.search.job import Job, Request
from autopar.search.manual import Manual
from autopar.search.problem import Problem, Progress, Reporting, Subproblem
from autopar.search.problem_data import load_problem, save_problem
from autopar.search.registry import Strategy, cuts_stages, register, strategies, strategy_named

__all__ = [
    "Budget",
    "Comparison",
    "Job",
    "Manual",
    "Plan",
    "Problem",
    "Progress",
    "Reporting",
    "Request",
    "Strategy",
    "Subproblem",
    "alpa",
    "cuts_stages",
    "load_problem",
    "register",
    "save_problem",
    "strategies",
    "strategy_named",
]
