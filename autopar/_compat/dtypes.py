"""Short dtype names, as jaxprs print them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
