"""Places of the first dim of an input, or of one layer of a stack, in the result of an operator."""

from __future__ import annotations

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import CASTS


def dim_in_result(op: Operator, dim: int, type: TensorType) -> int | None:
    """The dim of the results of ``op`` where the dim of its first operand is; None where it is in none.

    Of one slice of the first dim it is the next dim: where a stack of matrices is indexed each has a first dim of its
    own. A stack of vectors may be examples that are taken one by one.

    Args:
        op: passes its first operand on, as a whole or one slice of it.
        dim: of its first operand.
        type: of that operand.
    """
    if op.primitive in CASTS or op.primitive in ("copy", "stop_gradient"):
        return dim
    if op.primitive == "transpose":
        return op.ints("permutation").index(dim)
    if op.primitive == "squeeze":
        gone = {d % type.rank for d in op.ints("dimensions")}
        return None if dim in gone else dim - sum(d < dim for d in gone)
    if dim or type.rank < 3:
        return None
    if op.primitive in ("slice", "dynamic_slice") and op.results[0].type.shape == (1, *type.shape[1:]):
        return 1
    if op.primitive == "unstack" and op.integer("axis") == 0:
        return 0
    if op.primitive == "gather" and op.results[0].type.shape == type.shape[1:]:
        return 0 if op.ints("collapsed_slice_dims") == (0,) else None
    return None
