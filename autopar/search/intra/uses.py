"""Which reader of a value makes a conversion that later readers share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Layout
from autopar.search.intra.draft import Use


def firsts(uses: Sequence[Use], by_phase: bool) -> list[tuple[Use, NDArray[np.bool_]]]:
    """Each use with the choices of its node for which no use before it wants the same layout.

    One conversion serves both where they do.

    Args:
        uses: of one value.
        by_phase: whether each phase makes its own conversions.
    """
    first_uses: list[tuple[Use, NDArray[np.bool_]]] = []
    seen: dict[tuple[int, str, bool], list[tuple[Layout, ...]]] = {}
    for u in uses:
        before = seen.setdefault((u.node, u.phase if by_phase else "", u.stacked), [])
        if u.required in before:
            continue
        if before:
            new = np.array([all(k != b[i] for b in before) for i, k in enumerate(u.required)])
        else:
            new = np.ones(len(u.required), dtype=np.bool_)
        before.append(u.required)
        first_uses.append((u, new))
    return first_uses
