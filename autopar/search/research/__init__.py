"""Strategies that search by trying: one file each, on the same problems and evaluator as the integer program.

A method is a function of a `SearchRun`: it draws choices, scores them with ``run.space`` and offers them, until
``run.more()`` says that its steps are spent. `by_method` makes a strategy of it, over all logical meshes.
"""

from autopar.search.research.run import Method, SearchRun, by_method
from autopar.search.research.space import ChoiceWalk, Space

__all__ = ["ChoiceWalk", "Method", "SearchRun", "Space", "by_method"]
