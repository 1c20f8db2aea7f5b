"""Programs that fuzzing found to be wrong, made small by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.fuzz.check import assert_program
from tests.fuzz.support import argument

PLANS = tuple((mesh, seed) for mesh in ((8,), (2, 4)) for seed in (1, 5, 12))


@pytest.mark.parametrize("how", ["add", "set", "max"])
def test_a_write_at_one_position_of_a_split_dim(how):
    """XLA merges the slice that makes the piece with the read of a scatter of one index, and reads elsewhere."""

    def step(x, i, u):
        return getattr(x.at[i.sum() % 16], how)(jnp.sin(u))

    with jax.enable_x64(True):
        args = (argument("float", (16, 7), 1), argument("int", (16, 7), 215), argument("float", (), 3))
    assert_program(step, args, *PLANS)
