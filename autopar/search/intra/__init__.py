"""Sharding of every operator on one device mesh, as a `ChoiceProblem` (Alpa, OSDI'22, section 4).

`build` states the problem; `extract` turns a choice into the plan's records.
"""

from autopar.search.intra.build import build
from autopar.search.intra.extract import Sharding, extract
from autopar.search.intra.sharding_problem import ShardingProblem

__all__ = ["Sharding", "ShardingProblem", "build", "extract"]
