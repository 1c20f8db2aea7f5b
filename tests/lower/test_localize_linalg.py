"""Factorizations, solves and Fourier transforms of batches, in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]


def positive(*batch: int) -> Any:
    a = np.random.default_rng(0).standard_normal((*batch, 3, 3)).astype(np.float32)
    return a @ np.swapaxes(a, -1, -2) + 4 * np.eye(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("cholesky", lax.linalg.cholesky),
        ("eigh", lax.linalg.eigh),
        ("lu", lax.linalg.lu),
        ("qr", lambda a: lax.linalg.qr(a, full_matrices=False)),
        ("svd", lax.linalg.svd),
    ],
)
def test_factorizations(name: str, function: Callable[..., Any]) -> None:
    ran = check_localized(function, positive(4, 2), primitive=name, meshes=X, limit=4, rtol=1e-4)
    assert len(ran) == 4
    # Batch dims are factors, matrix dims have none.
    assert case_of(function, positive(4, 2), primitive=name).rule.operands == ((0, 1, None, None),)


def test_triangular_solve() -> None:
    right = np.random.default_rng(1).standard_normal((8, 3, 2)).astype(np.float32)
    ran = check_localized(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        positive(8),
        right,
        primitive="triangular_solve",
        meshes=X,
        rtol=1e-4,
    )
    assert any(s.operand_layouts[1].partial for s in ran)
    assert any(s.split == 8 for s in ran)


@pytest.mark.parametrize("function", [jnp.fft.fft, jnp.fft.rfft2])
def test_fft(function: Callable[..., Any]) -> None:
    x = np.random.default_rng(2).standard_normal((8, 4, 6)).astype(np.float32)
    ran = check_localized(function, x, primitive="fft", meshes=X, limit=20, rtol=1e-4)
    assert any(s.result_layouts[0].partial for s in ran)
