"""Finds the reader of a value that makes a conversion which later readers share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Layout
from autopar.search.intra.draft import Use

#: A use, and the choices of its node that count; None for all.
First = tuple[Use, NDArray[np.bool_] | None]


def firsts(uses: Sequence[Use], by_phase: bool) -> list[First]:
    """Each use with the choices of its node for which no use before it wants the same layout; None where that is all.

    One conversion serves both where they do.

    Args:
        uses: of one value.
        by_phase: whether each phase makes its own conversions.
    """
    if len(uses) == 1:
        return [(uses[0], None)]
    first_uses: list[First] = []
    seen: dict[tuple[int, str, bool], list[tuple[Layout, ...]]] = {}
    for u in uses:
        before = seen.setdefault((u.node, u.phase if by_phase else "", u.stacked), [])
        if any(u.required is b for b in before) or u.required in before:
            continue
        new = np.array([all(k != b[i] for b in before) for i, k in enumerate(u.required)]) if before else None
        before.append(u.required)
        first_uses.append((u, None if new is None or new.all() else new))
    return first_uses
