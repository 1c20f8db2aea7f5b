"""Sizes of values by dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar._compat.dtypes import dtype_name
from autopar.errors import TraceError
from autopar.ir import TensorType, item_bytes


@pytest.mark.parametrize("dtype", ["x", "f6_e2m3fn", "V4", "", "F32"])
def test_a_dtype_of_unknown_size_is_refused(dtype):
    with pytest.raises(TraceError, match="whose size autopar does not know"):
        TensorType((2, 3), dtype)


@pytest.mark.parametrize(
    "name", ["bool_", "int8", "uint16", "int32", "bfloat16", "float16", "float32", "complex64", "float8_e4m3fn"]
)
def test_sizes_are_those_of_jax(name):
    dtype = jnp.dtype(name)
    assert TensorType((3, 5), dtype_name(dtype)).nbytes == 15 * dtype.itemsize


def test_values_without_data_have_no_bytes():
    assert item_bytes("token") == TensorType((7,), "token").nbytes == 0


def test_float0_is_bool_in_programs():
    assert dtype_name(jax.dtypes.float0) == "bool"
    assert TensorType((7,), dtype_name(jax.dtypes.float0)).nbytes == 7
