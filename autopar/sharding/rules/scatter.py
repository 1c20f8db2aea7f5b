"""Rules of writes at computed positions: the ``scatter`` family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, parallel, rule_of
from autopar.sharding.rules.elementwise import is_number
from autopar.sharding.rules.indexing import MODES


def scatter(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Updates (operand 2) written into operand 0 at the positions in operand 1.

    Factors are dims that windows cover whole, dims that all share (batching dims), dims of which an index
    picks one element (a device drops the updates that lie elsewhere) and, where updates are added, the
    dims of the updates: each device adds its own to its term of operand 0, and the result is a partial sum.
    """
    operand, indices, updates = operand_types
    # XLA drops all updates but one where an index has no components and the operand one element, which is
    # what a shard can have though the whole does not.
    if op.attr("mode") not in MODES or indices.shape[-1] == 0:
        return None
    windows, batching = op.ints("update_window_dims"), op.ints("operand_batching_dims")
    inserted = op.ints("inserted_window_dims")
    rows = [d for d in range(updates.rank) if d not in windows]
    shared = dict(zip(op.ints("scatter_indices_batching_dims"), batching, strict=True))
    kept = [d for d in range(operand.rank) if d not in inserted and d not in batching]
    sizes = {d: updates.shape[u] for d, u in zip(kept, windows, strict=True)} | dict.fromkeys(inserted, 1)
    adds = op.primitive in ("scatter-add", "scatter_add", "scatter-sub", "scatter_sub") and is_number(operand.dtype)

    loops = []
    for n, u in enumerate(rows):
        if n in shared:
            d = shared[n]
            loops.append(parallel(operand.shape[d], (0, d), (1, n), (2, u), (3, d)))
        elif adds:
            added = Factor(indices.shape[n], reduce="sum", partial_operands=(0,))
            loops.append(FactorPlaces(added, ((1, n), (2, u))))
    for d, u in zip(kept, windows, strict=True):
        if updates.shape[u] == operand.shape[d]:
            loops.append(parallel(operand.shape[d], (0, d), (2, u), (3, d)))
    loops += [
        parallel(operand.shape[d], (0, d), (3, d))
        for d in op.ints("scatter_dims_to_operand_dims")
        if sizes[d] == 1 and operand.shape[d] > 1
    ]
    return rule_of(loops, op, operand_types, _groups(op, operand, indices))


def _groups(op: Operator, operand: TensorType, indices: TensorType) -> tuple[tuple[int, ...], ...]:
    """Linear groups: sums of operand and updates; products of the operand alone.

    Overwriting is linear too, where it is clear which update wins: with one, or with different indices.
    """
    if not is_number(operand.dtype):
        return ()
    kind = op.primitive.removeprefix("scatter").lstrip("-_")
    if kind in ("add", "sub"):
        return ((0, 2),)
    if kind == "mul":
        return ((0,),)
    if kind == "":
        # A function of the user (``.at[].apply``) is not plain data and not among the attributes.
        overwrites = dict(op.attrs).get("update_jaxpr", "function") is None
        one = all(n == 1 for n in indices.shape[:-1])
        return ((0, 2),) if overwrites and (one or op.attr("unique_indices") is True) else ()
    return ()


_NAMES = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "scatter_add",
          "scatter_max", "scatter_min", "scatter_mul", "scatter_sub")  # fmt: skip

RULES: Mapping[str, RuleFunction] = MappingProxyType(dict.fromkeys(_NAMES, scatter))
