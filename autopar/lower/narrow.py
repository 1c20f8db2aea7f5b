"""Gathers and sums of shards in a narrow format, inside ``jax.shard_map`` (qwZ and qgZ of ZeRO++, Wang et al., 2023).

A message is one array of bytes: codes, and behind them the scales of their blocks. A sum is one all-to-all of messages;
terms are decoded and added up in float32, so that nothing is rounded once a hop as in a ring. An all-reduce encodes
what that makes once more and gathers it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.sharding.reshard import ReshardStep
from autopar.transforms.formats import Encoded, Format


def apply_narrow(step: ReshardStep, array: Any, axes: Any, group: int) -> Any:
    """The shard after a step that is sent in a format.

    Args:
        step: a gather or a sum with a format.
        array: this device's shard before.
        axes: names of the mesh axes, as jax takes them.
        group: devices in a group along them.
    """
    format, shape = Format.parse(step.wire), list(array.shape)
    if step.kind == "all-gather":
        rows = _gathered(format, array.reshape(-1), axes).astype(array.dtype)
        shape[step.dim] *= group
        return jnp.moveaxis(rows.reshape(group, *array.shape), 0, step.dim).reshape(shape)
    if step.kind == "reduce-scatter":
        shape[step.dim] //= group
        parts = array.reshape(*array.shape[: step.dim], group, *shape[step.dim :])
        rows = jnp.moveaxis(parts, step.dim, 0).reshape(group, -1)
        return _summed(format, rows, axes).reshape(shape).astype(array.dtype)
    flat = array.reshape(-1)
    chunk = -(-flat.size // group)
    rows = jnp.pad(flat, (0, chunk * group - flat.size)).reshape(group, chunk)
    whole = _gathered(format, _summed(format, rows, axes), axes).reshape(-1)
    return whole[: flat.size].reshape(shape).astype(array.dtype)


def _gathered(format: Format, flat: Any, axes: Any) -> Any:
    """``flat`` of every device of a group, ``[group, elements]`` in float32."""
    sent = lax.all_gather(_message(format.encode(flat)), axes, axis=0, tiled=False)
    return _decoded(format, sent, flat.size)


def _summed(format: Format, rows: Any, axes: Any) -> Any:
    """The sum over a group of the row that is this device's, in float32."""
    # XLA's CPU compiler cannot do with what another all-to-all made, which it takes apart and forwards.
    messages = lax.optimization_barrier(_message(format.encode(rows)))
    sent = lax.all_to_all(messages, axes, split_axis=0, concat_axis=0, tiled=True)
    return jnp.sum(_decoded(format, sent, rows.shape[-1]), axis=0)


def _message(encoded: Encoded) -> Any:
    """Codes and scales as bytes, ``[..., bytes]``."""
    codes = _bytes(encoded.codes)
    if not encoded.scales.size:
        return codes
    lead = encoded.scales.shape[:-1]
    return jnp.concatenate([codes.reshape(*lead, -1), _bytes(encoded.scales)], axis=-1)


def _bytes(array: Any) -> Any:
    """An array's bytes, those of the last dim together."""
    if array.dtype == jnp.uint8:
        return array
    raw = lax.bitcast_convert_type(array, jnp.uint8)
    return raw if raw.ndim == array.ndim else raw.reshape(*array.shape[:-1], -1)


def _decoded(format: Format, message: Any, elements: int) -> Any:
    """The numbers in ``message``, ``[..., elements]`` in float32."""
    lead = message.shape[:-1]
    if format.name == "bf16":
        codes = lax.bitcast_convert_type(message.reshape(*lead, elements, 2), jnp.bfloat16)
        return codes.astype(jnp.float32)
    _, blocks = format.blocks(elements)
    codes, scales = jnp.split(message, [message.shape[-1] - 4 * blocks], axis=-1)
    codes = codes.reshape(*lead, blocks, -1)
    floats = lax.bitcast_convert_type(scales.reshape(*lead, blocks, 4), jnp.float32)
    dtype = format.code_dtype
    encoded = Encoded(codes if dtype == jnp.uint8 else lax.bitcast_convert_type(codes, dtype), floats)
    return format.decode(encoded, (*lead, elements))
