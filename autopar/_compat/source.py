"""Where in the user's code an equation comes from."""

from __future__ import annotations

from typing import Any

from jax.extend import source_info_util


def source_line(source_info: Any) -> str:
    """``file.py:12 (function)``, the folder left out so that plans do not depend on it; "" if unknown."""
    text = source_info_util.summarize(source_info)
    place, separator, function = text.partition(" ")
    if not separator or text.startswith("unknown"):
        return ""
    return f"{place.replace(chr(92), '/').rsplit('/', 1)[-1]} {function}"
