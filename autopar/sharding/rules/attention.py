"""Rules of attention in blocks: batch dims and heads are factors, and the tokens one along which keys travel.

Of a loop that some result has not, shards would leave partial sums of some results alone, so it stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType, item_bytes
from autopar.ir.blockwise import ATTENTION, BACKWARD, AttentionSpec
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, rule_of
from autopar.sharding.ring import Travel


def attention(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Loops that all results have are factors; that over tokens labels the keys' too, which go around."""
    spec = AttentionSpec.of(op)
    tensors = (*spec.operands, *spec.results)
    sizes = spec.sizes([t.shape for t in operand_types])
    shared = set.intersection(*(set(k) for k in spec.results)) - {spec.rows, spec.keys, None}
    loops = [
        FactorPlaces(Factor(sizes[i]), tuple((t, k.index(i)) for t, k in enumerate(tensors) if i in k))
        for i in sorted(i for i in shared if i is not None)
    ]
    if spec.rows is not None:
        places = [(t, k.index(spec.rows)) for t, k in enumerate(tensors) if spec.rows in k]
        # Values from outside keep all keys: a block of them is cut out.
        keys = [t for t, k in enumerate(tensors) if spec.keys in k and (t in (1, 2) or t >= len(spec.operands))]
        places += [(t, tensors[t].index(spec.keys)) for t in keys]
        travels = tuple(_travels(op, spec))
        loops.append(FactorPlaces(Factor(sizes[spec.rows], travels=travels), tuple(sorted(places))))
    return rule_of(loops, op, operand_types)


def _travels(op: Operator, spec: AttentionSpec) -> list[Travel]:
    """Keys and values, and in the backward pass their gradients."""
    dims = {n: spec.operands[n].index(spec.keys) for n in (1, 2)}
    there = [Travel(n, dim) for n, dim in dims.items()]
    back = [
        Travel(n, dims[n], returns=True, width=max(4, round(item_bytes(v.type.dtype))))
        for n, v in zip(spec.gradients, op.results, strict=False)
        if n in dims
    ]
    return there + back


RULES: Mapping[str, RuleFunction] = MappingProxyType({ATTENTION: attention, BACKWARD: attention})
