"""Rules of reads at computed positions: ``gather``, ``dynamic_slice``, ``dynamic_update_slice``, ``top_k``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, parallel, rule_of
from autopar.sharding.rules.elementwise import is_number

#: Modes of out-of-bounds indices that the localizers reproduce.
MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")


def gather(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Slices of operand 0 at the positions in operand 1.

    Factors are the dims of the indices (one a row of the result), dims of the operand that slices have whole, dims that
    operand and indices share (batching dims), and dims of which an index picks one element. A device that holds a shard
    of the last kind gives the rows that it has and zeros for others, so the result is a partial sum (the
    vocabulary-parallel embedding of Megatron-LM, 2019, section 3).
    """
    operand, indices = operand_types
    result = op.results[0].type
    if op.attr("mode") not in MODES:
        return None
    offset, picked = op.ints("offset_dims"), op.ints("start_index_map")
    batching, sizes = op.ints("operand_batching_dims"), op.ints("slice_sizes")
    rows = [d for d in range(result.rank) if d not in offset]
    shared = dict(zip(op.ints("start_indices_batching_dims"), batching, strict=True))
    loops = []
    for n, r in enumerate(rows):
        both = ((0, shared[n]),) if n in shared else ()
        loops.append(parallel(indices.shape[n], *both, (1, n), (2, r)))
    kept = [d for d in range(operand.rank) if d not in op.ints("collapsed_slice_dims") and d not in batching]
    for d, r in zip(kept, offset, strict=True):
        if sizes[d] == operand.shape[d]:
            loops.append(parallel(operand.shape[d], (0, d), (2, r)))
    if is_number(operand.dtype):
        loops += [
            FactorPlaces(Factor(operand.shape[d], reduce="sum"), ((0, d),))
            for d in picked
            if sizes[d] == 1 and operand.shape[d] > 1
        ]
    # A fill that is not zero would be added once for every term.
    fills = op.attr("mode") == "FILL_OR_DROP" and op.attr("fill_value") not in (0, False)
    return rule_of(loops, op, operand_types, ((0,),) if is_number(operand.dtype) and not fills else ())


def dynamic_slice(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Dims taken whole are factors (their start is clamped to 0). Linear in the operand."""
    operand, result = operand_types[0], op.results[0].type
    loops = [
        parallel(n, (0, d), (len(operand_types), d))
        for d, (n, taken) in enumerate(zip(operand.shape, result.shape, strict=True))
        if n == taken
    ]
    return rule_of(loops, op, operand_types, ((0,),) if is_number(operand.dtype) else ())


def dynamic_update_slice(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Dims that the update covers are factors. Linear in operand and update together."""
    operand, update = operand_types[:2]
    loops = [
        parallel(n, (0, d), (1, d), (len(operand_types), d))
        for d, (n, covered) in enumerate(zip(operand.shape, update.shape, strict=True))
        if n == covered
    ]
    return rule_of(loops, op, operand_types, ((0, 1),) if is_number(operand.dtype) else ())


def top_k(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``top_k`` and ``approx_top_k``: every dim but the searched one, of operand, values and positions."""
    (operand,) = operand_types
    name = "axis" if op.primitive == "top_k" else "reduction_dimension"
    searched = op.integer(name) % operand.rank
    loops = [
        parallel(n, (0, d), *((1 + r, d) for r in range(len(op.results))))
        for d, n in enumerate(operand.shape)
        if d != searched
    ]
    return rule_of(loops, op, operand_types)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "approx_top_k": top_k,
        "dynamic_slice": dynamic_slice,
        "dynamic_update_slice": dynamic_update_slice,
        "gather": gather,
        "top_k": top_k,
    }
)
