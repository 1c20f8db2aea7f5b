"""Folder of plans."""

from __future__ import annotations

from collections.abc import Mapping

from autopar._compat.files import CACHE_VARIABLE, cache_root
from autopar.search.cache.store import PlanCache

#: Environment variable that names the folder of what autopar keeps, or turns that off.
VARIABLE = CACHE_VARIABLE


def plan_cache(environment: Mapping[str, str]) -> PlanCache | None:
    """The cache that an environment asks for, in a folder ``plans``; None where it is turned off.

    Args:
        environment: variables; see `cache_root`.
    """
    root = cache_root(environment)
    return None if root is None else PlanCache(root / "plans")
