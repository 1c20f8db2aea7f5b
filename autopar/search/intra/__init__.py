"""Sharding of every operator on one device mesh, as a `ChoiceProblem` (Alpa, OSDI'22, section 4).

`build` states the problem; `extract` turns a choice into the plan's records; `explain` says why.
"""

from autopar.search.intra.build import ShardingProblem, build
from autopar.search.intra.extract import Sharding, extract

__all__ = ["Sharding", "ShardingProblem", "build", "extract"]
