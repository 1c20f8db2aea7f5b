"""Measuring in a process that has done nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Found = TypeVar("Found")


def in_new_process(measure: Callable[P, Found], *args: P.args, **kwargs: P.kwargs) -> Found:
    """What ``measure`` returns in a new process, which imports everything again; its errors are raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()
