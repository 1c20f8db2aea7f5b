"""The simulator, and timelines of simulated and measured steps.

This package can be called: ``autopar.simulate(plan)`` is `simulate` of it. Functions and packages of one name live
in one place, since Python puts an imported package where the function would be.
"""

import sys
from types import ModuleType

from autopar.plan import Plan
from autopar.simulate.durations import Durations, equal_stages
from autopar.simulate.engine import run, steady
from autopar.simulate.event import Event, Memory
from autopar.simulate.passes import Route, StepModel, is_plain, step_of
from autopar.simulate.plans import parts_of, program_of, record_of, routes_of, simulate
from autopar.simulate.timeline import Timeline

__all__ = [
    "Durations",
    "Event",
    "Memory",
    "Route",
    "StepModel",
    "Timeline",
    "equal_stages",
    "is_plain",
    "parts_of",
    "program_of",
    "record_of",
    "routes_of",
    "run",
    "simulate",
    "steady",
    "step_of",
]


class _CallablePackage(ModuleType):
    """A package that is called like the function of its name."""

    def __call__(self, plan: Plan, depth: int | None = None) -> Timeline:
        return simulate(plan, depth)


sys.modules[__name__].__class__ = _CallablePackage
