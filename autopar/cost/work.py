"""What one operator has to do, whole, apart from how it is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir import Operator, TensorType

Kind = Literal["", "convolution", "kernel gradient"]


@dataclass(frozen=True)
class Work:
    """What one operator computes and moves on whole tensors.

    Args:
        flops: FLOPs.
        bytes: bytes that it reads and writes.
        dtype: jaxpr name of the dtype that it computes in.
        kind: what decides how much of the peak it reaches, if a device tells these apart.
        function: primitive of an elementwise function, or "".
        elements: of the function.
        reordered: (bytes read, bytes between elements that come to lie side by side) of each operand that must be
            brought into another order first; see `autopar.cost.orders`.
        run_bytes: of a reduction, the bytes that lie side by side and go into one result; 0 of others.
    """

    flops: float
    bytes: float
    dtype: str
    kind: Kind = ""
    function: str = ""
    elements: float = 0.0
    reordered: tuple[tuple[float, int], ...] = ()
    run_bytes: int = 0


def kind_of(op: Operator, operand_types: Sequence[TensorType]) -> Kind:
    """The kind of `Work` that ``op`` does.

    Args:
        op: the operator; ``conv_general_dilated`` has the attributes ``rhs_spec`` and ``out_spec``.
        operand_types: type of each operand.
    """
    if op.primitive != "conv_general_dilated":
        return ""
    result = op.results[0].type.shape
    window = [operand_types[1].shape[d] for d in op.ints("rhs_spec")[2:]]
    out = [result[d] for d in op.ints("out_spec")[2:]]
    return "kernel gradient" if sum(w > o for w, o in zip(window, out, strict=True)) > len(out) / 2 else "convolution"
