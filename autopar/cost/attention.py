"""Work of attention in blocks: its products, what they move, and the memory of a block.

Of s scores with d dims of queries and e of values the forward pass takes 2 s (d + e) FLOPs in two products, the
backward pass 2 s (3 d + 2 e) in five, for it makes the scores again (Dao et al., "FlashAttention", 2022, section 3.1).
Each product writes its scores or reads them, once. Under a causal mask tokens may be cut into halves: of 4 n products
of halves in a ring of n devices 2 n + 1 have scores that the mask leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.kernels import Matrices
from autopar.ir import Operator, item_bytes
from autopar.ir.blockwise import ATTENTION, BACKWARD, AttentionSpec

#: Operators of attention in blocks.
ATTENTIONS = frozenset({ATTENTION, BACKWARD})

# Scores that are written or read: forward the product, what the softmax is of, probabilities; backward more of them.
_TRAFFIC = {ATTENTION: 4, BACKWARD: 9}
# Operations an element of the scores outside of products.
_ELEMENTWISE = {ATTENTION: 5, BACKWARD: 8}
# Blocks of scores that are there at a time: compilers keep what a product makes, and what the next one takes.
_BLOCKS = {ATTENTION: 2, BACKWARD: 3}


def attention_products(op: Operator, shapes: Sequence[tuple[int, ...]], width: float) -> list[Matrices]:
    """The products of an operator of `ATTENTIONS`.

    Args:
        op: the operator.
        shapes: of its operands, on one device.
        width: bytes of an element of the operands.
    """
    spec = AttentionSpec.of(op)
    sizes = spec.sizes(shapes)
    scores = [i for i in spec.scores if i is not None]
    batch = math.prod(sizes[i] for i in scores if i in spec.operands[1] and i != spec.keys)
    rows = math.prod(sizes[i] for i in scores if i not in spec.operands[1])
    depth, wide = (math.prod(sizes[i] for i in spec.operands[n] if i is not None and i not in scores) for n in (0, 2))
    keys = sizes[spec.keys]
    to_keys, to_values = Matrices(batch, rows, keys, depth, width), Matrices(batch, rows, keys, wide, width)
    if op.primitive == ATTENTION:
        return [to_keys, Matrices(batch, rows, wide, keys, width)]
    back = {
        0: Matrices(batch, rows, depth, keys, width),
        1: Matrices(batch, keys, depth, rows, width),
        2: Matrices(batch, keys, wide, rows, width),
    }
    return [to_keys, to_values, *(back[n] for n in spec.gradients)]


def halved_shapes(op: Operator, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of operands of an operator of `ATTENTIONS` with half of the rows and half of the keys."""
    spec = AttentionSpec.of(op)
    halved = {spec.rows, spec.keys} - {None}
    return [
        tuple(n // 2 if i in halved else n for i, n in zip(labels, shape, strict=True))
        for labels, shape in zip(spec.operands, shapes, strict=True)
    ]


def units_of_halves(devices: int) -> int:
    """Products of halves that each device of a ring makes under a causal mask (`autopar.lower.localize.attention`)."""
    return 2 * devices + 1


def scores_of(op: Operator, shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of the scores of an operator of `ATTENTIONS`, from the shapes of its operands."""
    spec = AttentionSpec.of(op)
    sizes = spec.sizes(shapes)
    return math.prod(sizes[i] for i in spec.scores if i is not None)


def attention_flops(op: Operator, shapes: Sequence[tuple[int, ...]]) -> float:
    """FLOPs of an operator of `ATTENTIONS`; arguments as of `attention_products`."""
    products = sum(float(p.flops) for p in attention_products(op, shapes, 1))
    return products + _ELEMENTWISE[op.primitive] * float(scores_of(op, shapes))


def score_traffic_bytes(op: Operator, shapes: Sequence[tuple[int, ...]], width: float) -> float:
    """Bytes of scores that are written and read; ``width`` are those of a score."""
    return float(_TRAFFIC[op.primitive] * scores_of(op, shapes) * width)


def workspace_bytes(op: Operator, shapes: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> int:
    """Bytes that an operator of `ATTENTIONS` needs while it runs, besides operands and results.

    Scores of a block, sums that are wider than results, and keys and values that come while others are here.

    Args:
        op: the operator.
        shapes: of its operands, on one device.
        results: of its results, on one device.
    """
    spec = AttentionSpec.of(op)
    sizes = spec.sizes(shapes[:3])
    block = math.prod(sizes[i] for i in spec.scores if i is not None) // sizes[spec.keys] * spec.block_keys(sizes)
    width = score_width(op)
    sums = results[:1] if op.primitive == ATTENTION else results
    wide = sum(max(4, item_bytes(v.type.dtype)) * math.prod(s) for v, s in zip(op.results, sums, strict=False))
    return math.ceil(_BLOCKS[op.primitive] * block * width + wide)


def score_width(op: Operator) -> float:
    """Bytes of a score."""
    return item_bytes(op.region("scores").outputs[0].type.dtype)
