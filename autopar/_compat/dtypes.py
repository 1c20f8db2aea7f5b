"""Short dtype names, as jaxprs print them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: By numpy's name of a dtype of which several elements share a byte one of a whole byte that has all of its values.
SUB_BYTE: Mapping[str, str] = MappingProxyType(
    {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"}
)
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
_PREFIXES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


@lru_cache(maxsize=128)  # a graph asks tens of thousands of times for the same few, and numpy builds each name again
def dtype_name(dtype: Any) -> str:
    """``f32`` for float32, ``key<fry>`` for threefry keys; ``bool``, as in jax's programs, for float0."""
    if dtype == jax.dtypes.float0:
        return "bool"
    text = str(dtype) if not isinstance(dtype, type) else str(np.dtype(dtype))
    for long, short in _PREFIXES:
        if text.startswith(long):
            return short + text[len(long) :]
    return text


def whole_bytes(dtype: Any) -> Any:
    """A dtype of whole bytes that has all values of ``dtype``: itself but for bool and where elements share a byte."""
    return jnp.dtype("uint8" if dtype == jnp.bool_ else SUB_BYTE.get(dtype.name, dtype))


def bytes_of(array: Any) -> Any:
    """The bytes of an array, flat."""
    flat = array.reshape(-1).astype(whole_bytes(array.dtype))
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1)
    return lax.bitcast_convert_type(flat, jnp.uint8).reshape(-1)


def from_bytes(flat: Any, like: Any) -> Any:
    """The array that `bytes_of` made bytes of, of the shape and dtype of ``like``."""
    dtype = whole_bytes(like.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        half = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        parts = lax.bitcast_convert_type(flat.reshape(-1, 2, dtype.itemsize // 2), half)
        return lax.complex(parts[:, 0], parts[:, 1]).reshape(like.shape)
    numbers = flat.reshape(-1, dtype.itemsize) if dtype.itemsize > 1 else flat
    return lax.bitcast_convert_type(numbers, dtype).astype(like.dtype).reshape(like.shape)


def numpy_dtype(name: str) -> Any:
    """The numpy dtype called ``name``; ValueError for keys and tokens, which have none."""
    for long, short in _PREFIXES:
        rest = name[len(short) :]
        if name.startswith(short) and rest[:1].isdigit():
            return jnp.dtype(long + rest)
        if name.startswith("f8_") or name.startswith("f4_"):
            return jnp.dtype("float" + name[1:])
    if name == "bool":
        return np.dtype(np.bool_)
    raise ValueError(f"{name} is not a numpy dtype")


def jax_dtype(name: str) -> Any:
    """The dtype called ``name``, that of typed random keys too."""
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0, impl=key_impl(name))).dtype
    return numpy_dtype(name)


def key_impl(name: str) -> str:
    """jax's name of the generator of the keys whose dtype is called ``name``."""
    return _KEYS[name]
