"""Recomputation: values of the forward pass that the backward pass recomputes instead of holding them.

`select` says what of each layer is held and what is recomputed, `recomputed` rewrites a graph accordingly.
Levels: "none"; "full": only what enters a layer is held (Chen et al., 2016); "selective": the fewest bytes with which
no matrix product, nor another operator that is dear, has to be repeated (in the spirit of Korthikanti et al., MLSys'23,
section 5; `autopar.recompute.select.cheapest_saved` has the formula).
"""

from autopar.recompute.rewrite import Recomputed, recomputed
from autopar.recompute.select import LEVELS, Level, Phases, Selected, select

__all__ = ["LEVELS", "Level", "Phases", "Recomputed", "Selected", "recomputed", "select"]
