"""`not_before`: a piece waits for a value and keeps its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.lower.barriers import not_before
from tests.fuzz.check import assert_program

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_piece_keeps_its_value_whatever_it_waits_for(x64, dtype):
    """Missing values in a batch are NaN, and constants may be."""
    piece = jnp.arange(6.0)
    drawn = np.random.default_rng(0).standard_normal(20)
    for number in (np.nan, np.inf, -np.inf, 0.0, -0.0, *drawn):
        now = jnp.full((2, 3), number).astype(dtype)
        np.testing.assert_array_equal(jax.jit(not_before)(piece, now), piece)


def test_the_compiler_does_not_see_that_it_need_not_wait():
    # An argument that a compiled program does not need is dropped from it.
    program = jax.jit(not_before).lower(jnp.zeros(6), jnp.zeros((2, 3))).compile()
    assert "parameter(1)" in program.as_text()


def test_a_plan_of_a_step_that_marks_missing_values():
    def step(x):
        return jnp.where(x != x, jnp.broadcast_to(jnp.full(7, jnp.nan), (8, 7)), x)

    with jax.enable_x64(True):
        x = jnp.arange(56.0).reshape(8, 7)
    assert_program(step, (x,), ((2, 4), 5))  # with NaN in place of numbers before
