"""The public interface: composes the floors below, holds no algorithm."""

from autopar.api.check import CheckReport, check
from autopar.api.compiled import Compiled
from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize

__all__ = ["CheckReport", "Compiled", "ParallelFunction", "check", "parallelize"]
