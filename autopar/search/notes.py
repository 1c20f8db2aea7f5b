"""Notes of plans: what a form of the step does that its reader may not expect."""

from __future__ import annotations

from autopar.ir import Graph
from autopar.ir.analysis import unread_effects
from autopar.ir.loops import microbatch_loops


def meetings(graph: Graph) -> list[str]:
    """Note on meetings of examples, where a step in one stage has several loops over microbatches."""
    loops = microbatch_loops(graph)
    if loops < 2:
        return []
    return [f"examples meet: {loops} loops over the microbatches run the forward pass {loops} times"]


def left_out(graph: Graph) -> str:
    """Operators that stages do not run, as text; "" where they run all."""
    unread = unread_effects(graph)
    if not unread:
        return ""
    lines = ", ".join(dict.fromkeys(op.source or op.id for op in unread))
    return f"stages run what outputs need, no print or callback without a result ({lines}): num_stages=1 runs them"
