"""Where plans are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.search.cache.store import PlanCache

#: Environment variable that names the folder of what autopar keeps, or turns that off.
VARIABLE = "AUTOPAR_CACHE_DIR"

_OFF = ("", "0", "none", "off")


def plan_cache(environment: Mapping[str, str]) -> PlanCache | None:
    """The cache that an environment asks for, in a folder ``plans``; None where it is turned off.

    Args:
        environment: variables. `VARIABLE` is a folder, or one of "", "0", "none" and "off" for no cache. Without it the
            folder is ``autopar`` in ``XDG_CACHE_HOME``, or in ``~/.cache`` where that is no absolute path.
    """
    asked = environment.get(VARIABLE)
    if asked is not None and asked.strip().lower() in _OFF:
        return None
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    folder = Path(asked) if asked is not None else (shared if shared.is_absolute() else Path("~/.cache")) / "autopar"
    try:
        return PlanCache(folder.expanduser() / "plans")
    except RuntimeError:  # nobody's home
        return None
