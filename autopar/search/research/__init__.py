"""Strategies that search by trying, on the same problems and evaluator as the integer program.

A method is a function of a `MethodRun`: it draws choices, scores them with ``run.space`` and offers them, until
``run.more()`` says that its steps are spent. `by_method` makes a strategy of it, over all logical meshes.
"""

from autopar.search.research.run import Method, MethodRun, Space, Walk, by_method

__all__ = ["Method", "MethodRun", "Space", "Walk", "by_method"]
