"""Techniques that change what a train step computes, as functions from steps to steps that run on any plan.

Each is asked for by name; "auto" chooses none. docs/transforms.md has the equations, memory and oracle of each.
"""

from autopar.transforms.corrections import Extrapolated, dc_asgd, pipemare_rate, staleness_aware_rate
from autopar.transforms.delayed import Correction, Delayed, DelayedState, Prediction, delayed
from autopar.transforms.parameters import Parameters
from autopar.transforms.split import Split, split

__all__ = [
    "Correction",
    "Delayed",
    "DelayedState",
    "Extrapolated",
    "Parameters",
    "Prediction",
    "Split",
    "dc_asgd",
    "delayed",
    "pipemare_rate",
    "split",
    "staleness_aware_rate",
]
