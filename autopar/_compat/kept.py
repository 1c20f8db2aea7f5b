"""The folder of what autopar keeps between processes: plans, compiled loops, calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Environment variable that names the folder of what autopar keeps, or turns that off.
CACHE_VARIABLE = "AUTOPAR_CACHE_DIR"

_OFF = ("", "0", "none", "off")


def cache_root(environment: Mapping[str, str]) -> Path | None:
    """The folder of what autopar keeps of a user's programs; None where the environment turns that off.

    Args:
        environment: variables. `CACHE_VARIABLE` is a folder, or one of "", "0", "none" and "off" for none. Without it
            the folder is ``autopar`` in ``XDG_CACHE_HOME``, or in ``~/.cache`` where that is no absolute path.
    """
    asked = environment.get(CACHE_VARIABLE)
    if asked is not None and asked.strip().lower() in _OFF:
        return None
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    folder = Path(asked) if asked is not None else (shared if shared.is_absolute() else Path("~/.cache")) / "autopar"
    try:
        return folder.expanduser()
    except RuntimeError:  # the user has no home directory
        return None
