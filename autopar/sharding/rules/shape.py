"""Rules of primitives that move elements: transpose, broadcast, slice, pad, concatenate and their kin.

All are linear. A dim that the primitive treats element by element is a factor; any other is whole, but for dims that
are padded or cut: their shards get elements of their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autopar.ir import Literal, Operator, TensorType
from autopar.sharding.factors import Dims, Factor, Rule, RuleFunction
from autopar.sharding.halo import Halo
from autopar.sharding.rules.elementwise import is_number


def _linear(type: TensorType, *operands: int) -> tuple[tuple[int, ...], ...]:
    return (operands or (0,),) if is_number(type.dtype) else ()


def transpose(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Result dim i is operand dim ``permutation[i]``."""
    (type,) = operand_types
    return Rule(
        factors=tuple(Factor(n) for n in type.shape),
        operands=(tuple(range(type.rank)),),
        results=(op.ints("permutation"),),
        linear=_linear(type),
    )


def squeeze(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """``dimensions`` of size 1 vanish; the others keep their order."""
    (type,) = operand_types
    gone = op.ints("dimensions")
    kept = [d for d in range(type.rank) if d not in gone]
    return Rule(
        factors=tuple(Factor(type.shape[d]) for d in kept),
        operands=(tuple(kept.index(d) if d in kept else None for d in range(type.rank)),),
        results=(tuple(range(len(kept))),),
        linear=_linear(type),
    )


def broadcast_in_dim(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """New and stretched dims are factors that the result alone has. Linear: a zero is a partial zero."""
    if len(operand_types) != 1:
        return None
    (type,) = operand_types
    shape = op.ints("shape")
    placed = op.ints("broadcast_dimensions")
    return Rule(
        factors=tuple(Factor(n) for n in shape),
        operands=(tuple(d if n == shape[d] else None for n, d in zip(type.shape, placed, strict=True)),),
        results=(tuple(range(len(shape))),),
        linear=_linear(type),
    )


def iota(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Every dim; a device counts from the start of its shard."""
    if operand_types:
        return None
    shape = op.ints("shape")
    return Rule(tuple(Factor(n) for n in shape), (), (tuple(range(len(shape))),))


def _kept(
    op: Operator,
    operand_types: tuple[TensorType, ...],
    whole: frozenset[int],
    linear: tuple[tuple[int, ...], ...],
    halos: Mapping[int, Halo] = MappingProxyType({}),
) -> Rule:
    """Tensors of the first operand's rank have its dims as factors, but for those in ``whole``; others are whole.

    ``halos``: by dim what its shards need of their neighbours; of numbers and truth values only.
    """
    first = operand_types[0]
    if is_number(first.dtype) or first.dtype == "bool":
        whole = whole - halos.keys()
    split = [d for d in range(first.rank) if d not in whole]
    labels: Dims = tuple(split.index(d) if d in split else None for d in range(first.rank))
    return Rule(
        factors=tuple(Factor(first.shape[d], halo=halos.get(d) if d not in whole else None) for d in split),
        operands=tuple(labels if t.rank == first.rank else (None,) * t.rank for t in operand_types),
        results=(labels,) * len(op.results),
        linear=linear,
    )


def concatenate(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Not along the concatenated dim; linear in all operands together."""
    linear = _linear(operand_types[0], *range(len(operand_types)))
    return _kept(op, operand_types, frozenset({op.integer("dimension")}), linear)


def pad(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Every dim, padded ones with edges of neighbours: elements of the result lie on other shards than before.

    Linear in the array alone where the padding is a literal 0, else in both together.
    """
    config: Any = op.attr("padding_config")
    if not isinstance(config, tuple):
        raise TypeError(f"padding_config of {op.id} is {config!r}")
    whole = frozenset(d for d, amounts in enumerate(config) if amounts != (0, 0, 0))
    value = op.operands[1]
    zero = isinstance(value, Literal) and value.is_zero
    # Labels go by rank, and an array of rank 0 has none to mistake the padding's for.
    sizes, counts = operand_types[0].shape, op.results[0].type.shape
    halos = {d: Halo.padded(sizes[d], counts[d], config[d]) for d in whole}
    return _kept(op, operand_types, whole, _linear(operand_types[0], *((0,) if zero else (0, 1))), halos)


def slice_(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Every dim, those that are not taken whole with edges of neighbours."""
    (type,) = operand_types
    starts, limits = op.ints("start_indices"), op.ints("limit_indices")
    strides = (1,) * type.rank if op.attr("strides") is None else op.ints("strides")
    taken = list(zip(starts, limits, strides, strict=True))
    whole = frozenset(d for d in range(type.rank) if taken[d] != (0, type.shape[d], 1))
    counts = op.results[0].type.shape
    halos = {d: Halo.taken(type.shape[d], counts[d], starts[d], strides[d]) for d in whole}
    return _kept(op, operand_types, whole, _linear(type), halos)


def rev(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Rule of ``rev``: reversed dims are not split."""
    return _kept(op, operand_types, frozenset(op.ints("dimensions")), _linear(operand_types[0]))


def roll(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Every dim; of the one that is rolled each device has edges of the next one around the circle."""
    (type,), dim = operand_types, op.integer("dim")
    n = type.shape[dim]
    return _kept(op, operand_types, frozenset({dim}), _linear(type), {dim: rolled(n, op.integer("shift"))})


def rolled(size: int, shift: int) -> Halo:
    """Windows of one element each: those of a dim that is rolled."""
    return Halo(size, size, 1, 1, shift, wraps=True)


def split(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Not the dim that is cut into results."""
    return _kept(op, operand_types, frozenset({op.integer("axis")}), _linear(operand_types[0]))


def stack(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """All dims but the new one; linear in all operands together."""
    type, axis = operand_types[0], op.integer("axis")
    labels: Dims = tuple(range(type.rank))
    return Rule(
        factors=tuple(Factor(n) for n in type.shape),
        operands=(labels,) * len(operand_types),
        results=((*labels[:axis], None, *labels[axis:]),),
        linear=_linear(type, *range(len(operand_types))),
    )


def unstack(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """All dims but the one that is taken apart."""
    (type,), axis = operand_types, op.integer("axis")
    sizes = type.shape[:axis] + type.shape[axis + 1 :]
    labels: Dims = tuple(range(len(sizes)))
    return Rule(
        factors=tuple(Factor(n) for n in sizes),
        operands=((*labels[:axis], None, *labels[axis:]),),
        results=(labels,) * len(op.results),
        linear=_linear(type),
    )


def tile(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Dims that are not repeated: shards of a repeated one would not lie as shards of the whole do."""
    repeated = frozenset(d for d, n in enumerate(op.ints("reps")) if n != 1)
    return _kept(op, operand_types, repeated, _linear(operand_types[0]))


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "broadcast_in_dim": broadcast_in_dim,
        "concatenate": concatenate,
        "iota": iota,
        "pad": pad,
        "rev": rev,
        "roll": roll,
        "slice": slice_,
        "split": split,
        "squeeze": squeeze,
        "stack": stack,
        "tile": tile,
        "transpose": transpose,
        "unstack": unstack,
    }
)
