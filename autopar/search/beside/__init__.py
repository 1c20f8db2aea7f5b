"""A second process that plans beside this one, so that two cores are used.

`promise` says what may be computed there, and computes it here where the other process has not begun it; `process` is
the other process seen from here, `main` what runs in it. Answers do not depend on where they were computed.
"""

from autopar.search.beside.process import Process, beginning
from autopar.search.beside.promise import ALONE, Beside, Promise

__all__ = ["ALONE", "Beside", "Process", "Promise", "beginning"]
