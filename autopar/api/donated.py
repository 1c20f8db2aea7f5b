"""Warnings about donated arguments whose buffers no result can reuse."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

from autopar.ir import Graph
from autopar.ir.analysis import unread_inputs


def warn_of_unused(graph: Graph, donated: Collection[int]) -> None:
    """Warns as `jax.jit` does of donated inputs that no result of the same type replaces; they are deleted too.

    Args:
        graph: of the step.
        donated: indices of the donated inputs.
    """
    results = Counter(o.type for o in graph.outputs)
    unread, unused = unread_inputs(graph), []
    for i in sorted(set(donated) - set(unread)):
        type = graph.inputs[i].type
        results[type] -= 1
        if results[type] < 0:
            unused.append(f"{graph.inputs[i].name} {type}")
    if unused:
        warnings.warn(
            f"Some donated buffers were not usable: {', '.join(unused)}.\n"
            "See an explanation at https://docs.jax.dev/en/latest/faq.html#buffer-donation.",
            stacklevel=2,
        )
