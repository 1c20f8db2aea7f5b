"""Plans on disk by what they are plans of, so that what was planned is not planned again.

`autopar.search.plain_data` writes what a plan depends on; `key` hashes it; `store` keeps files; `cached` makes a
strategy that looks there first; `folder` says where.
"""

from autopar.search.cache.cached import Cached, cached, cached_with_branches, cached_with_stages
from autopar.search.cache.key import key_of
from autopar.search.cache.store import VARIABLE, PlanCache, plan_cache

__all__ = [
    "VARIABLE",
    "Cached",
    "PlanCache",
    "cached",
    "cached_with_branches",
    "cached_with_stages",
    "key_of",
    "plan_cache",
]
