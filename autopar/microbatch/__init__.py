"""Finds the parts of a train step that run once for each microbatch, by the sharding rules.

Running a step in microbatches is splitting it over an axis of time: what a rule says of dims that may be
split over devices holds for dims that may be split over axis. So the analysis needs no marker and no second
trace: a value is whole, split along a dim, or a term of a reduction, exactly as on a mesh axis.
"""

from autopar.microbatch.analyze import analyze, batch_size, even_counts
from autopar.microbatch.barrier import analyze_with_barrier
from autopar.microbatch.base import AXIS, Joined, Microbatching, pseudo_mesh
from autopar.microbatch.batch_loops import BatchLoop, loops_over_batch
from autopar.microbatch.copies import Copies, copies_by_part
from autopar.microbatch.meetings import MicrobatchLoop, analyze_in_loops, operators_between

__all__ = [
    "AXIS",
    "BatchLoop",
    "Copies",
    "Joined",
    "MicrobatchLoop",
    "Microbatching",
    "analyze",
    "analyze_in_loops",
    "analyze_with_barrier",
    "batch_size",
    "copies_by_part",
    "even_counts",
    "loops_over_batch",
    "operators_between",
    "pseudo_mesh",
]
