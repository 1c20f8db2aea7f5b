"""Strategies that search by trying: one file each, on the same problems and evaluator as the integer program.

A method is a function of a `Run`: it draws choices, scores them with ``run.space`` and offers them, until
``run.more()`` says that its steps are spent. `by_method` makes a strategy of it, over all logical meshes.
"""

from autopar.search.research.run import Method, Run, by_method
from autopar.search.research.space import Space, Walk

__all__ = ["Method", "Run", "Space", "Walk", "by_method"]
