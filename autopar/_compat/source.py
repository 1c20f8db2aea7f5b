"""The user's line of an equation of a jaxpr, as ``file.py:12 (function)``; start with the public function."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from jax._src.source_info_util import Transform
from jax.extend import source_info_util

_OURS = str(Path(__file__).parent.parent)


def source_line(source_info: Any) -> str:
    """``file.py:12 (function)``, the folder left out so that plans do not depend on it; "" if unknown.

    Where that is a line of an installed package the line of the user's own that led to it is added:
    ``linear.py:287:8 (Dense.__call__), from train.py:33 (loss)``.
    """
    text = source_info_util.summarize(source_info)
    place, separator, function = text.partition(" ")
    if not separator or text.startswith("unknown"):
        return ""
    line = f"{_file(place)} {function}"
    if not _installed(place.rsplit(":", 2)[0]):
        return line
    user_line = _own_line(source_info.traceback)
    return f"{line}, from {user_line}" if user_line else line


def pass_of(source_info: Any) -> str:
    """ "forward" or "backward" of an equation that differentiation made, "" of others: scopes of users do not count."""
    made_by = {e.name for e in source_info.name_stack.stack if isinstance(e, Transform)}
    if "transpose" in made_by:
        return "backward"
    return "forward" if "jvp" in made_by else ""


def is_recomputed(source_info: Any) -> bool:
    """Whether an equation is in the scope that jax makes around what a remat computes again.

    It stands directly after the transformations, or at the beginning of the stack of an equation inside of the remat;
    a user's scope of its name stands after it, or in the forward pass.
    """
    stack = source_info.name_stack.stack
    inside = next((n + 1 for n in reversed(range(len(stack))) if isinstance(stack[n], Transform)), 0)
    return len(stack) > inside and bool(stack[inside].name == "rematted_computation")


def _own_line(traceback: Any) -> str:
    """The innermost frame that is neither in an installed package, nor Python's, nor ours."""
    if traceback is None:
        return ""
    codes, addresses = traceback.raw_frames()
    for code, address in zip(codes, addresses, strict=True):
        if not _installed(code.co_filename):
            number = type(traceback).code_addr2line(code, address)
            return f"{_file(code.co_filename)}:{number} ({code.co_qualname})"
    return ""


@cache
def _installed(file: str) -> bool:
    paths = sysconfig.get_paths()
    return file.startswith((paths["stdlib"], paths["purelib"], paths["platlib"], _OURS, "<")) or "-packages" in file


def _file(place: str) -> str:
    return place.replace(chr(92), "/").rsplit("/", 1)[-1]
