"""Functions that a floor offers to floors below it, by role.

A floor knows only those below. Where a lower one has the name that users call (`Cluster.ray`), and a higher one does
the work, the package's root says here which function that is; it is loaded when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hooks:
    """Functions that a higher floor offers to lower ones, by role."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], Callable[..., Any]]] = {}

    def offer(self, role: str, load: Callable[[], Callable[..., Any]]) -> None:
        """Says how the function for ``role`` is loaded; the last offer counts."""
        self._loaders[role] = load

    def function(self, role: str) -> Callable[..., Any]:
        """The function for ``role``.

        Raises:
            KeyError: nothing was offered for it.
        """
        return self._loaders[role]()


HOOKS = Hooks()
