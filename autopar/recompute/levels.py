"""Levels of recomputation, and the operators that are too expensive for it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from autopar.ir import Operator
from autopar.ir.primitives import EXPENSIVE

Level: TypeAlias = Literal["none", "selective", "full"]

#: All levels, from the one that holds the most.
LEVELS: tuple[Level, ...] = ("none", "selective", "full")


def stays_saved(op: Operator, level: Level) -> bool:
    """Whether ``op`` never runs again: what it makes is held where it is needed."""
    if op.effects or level == "none":
        return True
    return level == "selective" and (op.primitive in EXPENSIVE or bool(op.regions))
