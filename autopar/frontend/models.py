"""Finds the arguments that are a model in a function that returns no next one: an eval step, a server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autopar.frontend.first_dims import dim_in_result
from autopar.ir import Graph, Operand, Operator, TensorType
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of

_MODEL_WORDS = ("model", "p", "params", "parameters", "state", "train_state", "variables", "weights")


def may_be_batch(type: TensorType) -> bool:
    """Arrays with dims, except random keys: typed, or raw (two uint32)."""
    return type.rank > 0 and not type.dtype.startswith("key<") and not (type.dtype == "u32" and type.shape == (2,))


def model_arguments(graph: Graph, arguments: Sequence[tuple[int | str, str]]) -> set[int | str]:
    """Arguments that are a model.

    Examples lie in the first dim of every array of a batch. An argument whose arrays have first dims of several sizes,
    or that is called as models are, is none, if there is another that may be the batch. Where these say nothing, an
    argument is a model of which a product sums over the first dim of an array, or a loop takes it slice by slice next
    to what it carries.

    Args:
        graph: its inputs begin with the traced leaves.
        arguments: for each leaf its argument (position or name) and its path inside the argument.
    """
    firsts: dict[int | str, set[int]] = defaultdict(set)
    called: dict[int | str, str] = {}
    of_leaf: dict[str, int | str] = {}
    for leaf, (argument, inner) in zip(graph.inputs, arguments, strict=False):
        if may_be_batch(leaf.type):
            firsts[argument].add(leaf.type.shape[0])
            called[argument] = leaf.name.removesuffix(inner)
            of_leaf[leaf.name] = argument
    model = {a for a, sizes in firsts.items() if len(sizes) > 1 or called[a] in _MODEL_WORDS}
    model = model or {of_leaf[n] for n in _without_examples(graph) if n in of_leaf}
    return model if len(model) < len(firsts) else set()


def predicted(graph: Graph, arguments: Sequence[tuple[int | str, str]], batch_argnums: Sequence[int] | None) -> bool:
    """Whether the only result of a function is computed from examples by a model, and so replaces no argument.

    Predictions may have the shape of the examples, as state that comes back has.

    Args:
        graph: see `model_arguments`.
        arguments: likewise.
        batch_argnums: positions of the batch arguments; None finds them.
    """
    if batch_argnums is not None or len(graph.outputs) != 1 or graph.outputs[0].path:
        return False
    if any(phase_of(op) == "backward" for op in graph.operators):
        return False
    model = model_arguments(graph, arguments)
    pairs = list(zip(graph.inputs, arguments, strict=False))
    returned = graph.outputs[0].type
    equal = [i for i, (argument, path) in pairs if not path and argument not in model and i.type == returned]
    others = [i for i, (argument, _) in pairs if argument not in model and may_be_batch(i.type)]
    weights = [i for i, (argument, _) in pairs if argument in model]
    return bool(weights) and equal == others and all(i.type != returned for i in weights)


def _without_examples(graph: Graph) -> set[str]:
    """Inputs whose first dim holds no examples, by what reads them."""
    firsts: dict[str, tuple[str, int]] = {i.name: (i.name, 0) for i in graph.inputs}  # input, where its first dim is
    inputs: set[str] = set()
    for op in graph.operators:
        if op.operands and op.operands[0] in firsts:
            name, dim = firsts[str(op.operands[0])]
            moved = dim_in_result(op, dim, graph.type_of(op.operands[0]))
            firsts.update((r.name, (name, moved)) for r in op.results if moved is not None)
        taken = _not_by_example(op)
        inputs.update(firsts[o][0] for o, dims in taken if o in firsts and firsts[o][1] in dims)
    return inputs


def _not_by_example(op: Operator) -> list[tuple[Operand, Sequence[int]]]:
    """Operands of ``op`` with the dims that hold no examples: summed over, or taken one by one next to a carry."""
    if op.primitive == "dot_general":
        numbers: Any = op.attr("dimension_numbers")
        return list(zip(op.operands, numbers[0], strict=True))
    if op.primitive == "scan":
        _, carries, stacks = Scan.of(op).split(op.operands)
        return [(o, (0,)) for o in stacks] if any(isinstance(c, str) for c in carries) else []
    return []
