"""FLOPs of factorizations against counts from a textbook."""

from __future__ import annotations

import pytest

from autopar.cost.compute import factorization_flops
from autopar.ir import Operator, TensorType, Value


@pytest.mark.parametrize(
    ("primitive", "shapes", "wanted"),
    [
        ("cholesky", [(30, 30)], 9_000),
        ("lu", [(30, 30)], 18_000),
        ("qr", [(60, 30)], 180_000),
        ("eigh", [(4, 10, 10)], 36_000),
        ("svd", [(20, 10)], 32_000),
        ("triangular_solve", [(10, 10), (10, 7)], 700),
        ("tanh", [(10, 10)], 0),
    ],
)
def test_counts(primitive, shapes, wanted):
    types = [TensorType(s, "f32") for s in shapes]
    op = Operator(f"{primitive}.0", primitive, tuple(f"in.{i}" for i in range(len(types))), (Value("out", types[-1]),))
    assert factorization_flops(op, types) == pytest.approx(wanted)


def test_a_transform_of_rows():
    type = TensorType((3, 8), "c64")
    op = Operator("fft.0", "fft", ("in.0",), (Value("out", type),), (("fft_lengths", (8,)),))
    assert factorization_flops(op, [type]) == pytest.approx(5 * 24 * 3)
