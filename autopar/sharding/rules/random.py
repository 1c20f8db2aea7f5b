"""Rules of random primitives. Keys are small and stay whole; only drawn bits are split."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, Rule, RuleFunction


def random_bits(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Threefry counts every element (Salmon et al., SC'11), so a device can draw its own shard alone.

    The first dims of the result are those of the key array and stay whole. Other generators draw a stream, in which a
    shard cannot be found.
    """
    (key,) = operand_types
    if key.dtype != "key<fry>":
        return None
    shape = op.ints("shape")
    return Rule(
        factors=tuple(Factor(n) for n in shape),
        operands=((None,) * key.rank,),
        results=((None,) * key.rank + tuple(range(len(shape))),),
    )


def random_gamma(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Every key is split into one for each element of its part of the array, so only the key array's own dims
    (the first of the result) may be split: a shard of the others would draw the numbers of the first shard.
    """
    key, _ = operand_types
    (result,) = op.results
    labels = tuple(range(key.rank))
    rest = (None,) * (result.type.rank - key.rank)
    return Rule(
        factors=tuple(Factor(n) for n in key.shape),
        operands=(labels, labels + rest),
        results=(labels + rest,),
    )


def whole(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Run whole on every device."""
    return None


_WHOLE = (
    "random_clone",
    "random_fold_in",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "rng_bit_generator",
    "rng_uniform",
)

RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {"random_bits": random_bits, "random_gamma": random_gamma, **dict.fromkeys(_WHOLE, whole)}
)
