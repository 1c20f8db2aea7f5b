"""Results that a step makes before its backward loop are made before it, so that what they are made of is given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from autopar.ir import Graph
from autopar.lower.values import ComputedValue, Held


def done_before(graph: Graph, env: Mapping[str, Held | ComputedValue], carries: Sequence[Any]) -> list[Any]:
    """What a loop carries, not there before results of the step that are made already.

    Where memory is short the loss is summed, and a parameter behind the last layer updated, before the loop, as the
    plan has it. XLA's scheduler for GPUs would put that after the loop, with logits and their gradient in memory.

    Args:
        graph: the step.
        env: its values so far.
        carries: what the loop begins with.
    """
    names = dict.fromkeys(o.operand for o in graph.outputs if isinstance(o.operand, str))
    inputs = {i.name for i in graph.inputs}
    values = [(n, env[n]) for n in names if n in env and n not in inputs]
    held = [v for _, v in values if isinstance(v, Held) and ("", v.layout) in v.arrays and not v.away]
    if not held or not carries:
        return list(carries)
    after, results = lax.optimization_barrier((list(carries), [v.arrays["", v.layout] for v in held]))
    for v, array in zip(held, results, strict=True):
        v.arrays["", v.layout] = array
    return list(after)
