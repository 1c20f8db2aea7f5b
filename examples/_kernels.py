"""Norms, softmax and activations with the gradients of kernels that are written by hand.

Differentiation keeps what each elementwise operator needs, in float32. Such kernels (Megatron-LM's fused softmax and
bias-GELU, apex's norms, PyTorch's own) keep their operands in the dtype of the computation, or the softmax its result,
and statistics of rows, and compute the rest again where they read these. Values are the same but for rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Residuals = tuple[Any, ...]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def keeping_operands(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``fn`` of arrays, elementwise, whose gradient reads its operands alone."""

    @jax.custom_vjp
    def kernel(*operands: jax.Array) -> jax.Array:
        return fn(*operands)

    def forward(*operands: jax.Array) -> tuple[jax.Array, Residuals]:
        return fn(*operands), operands

    def backward(operands: Residuals, grad: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.vjp(fn, *operands)[1](grad))

    kernel.defvjp(forward, backward)
    return functools.wraps(fn)(lambda *operands: kernel(*operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def masked_softmax(scores: jax.Array, visible: jax.Array, head_dim: int) -> jax.Array:
    """Softmax over the last dim of ``scores / sqrt(head_dim)`` where ``visible``, in float32 or wider.

    Args:
        scores: ``[..., queries, keys]``.
        visible: bool ``[queries, keys]``; every row has one.
        head_dim: Width of a head.

    Returns:
        As ``scores``, which is all that the gradient reads.
    """
    wide = _wide(scores) * (1.0 / math.sqrt(head_dim))
    return jax.nn.softmax(jnp.where(visible, wide, -jnp.inf), axis=-1).astype(scores.dtype)


def _softmax_forward(scores: jax.Array, visible: jax.Array, head_dim: int) -> tuple[jax.Array, Residuals]:
    shares = masked_softmax(scores, visible, head_dim)
    return shares, (shares,)


def _softmax_backward(head_dim: int, kept: Residuals, grad: jax.Array) -> tuple[jax.Array, None]:
    shares, wide = _wide(kept[0]), _wide(grad)
    inner = shares * (wide - jnp.sum(wide * shares, axis=-1, keepdims=True))
    return (inner * (1.0 / math.sqrt(head_dim))).astype(grad.dtype), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """LayerNorm over the last dim, or RMSNorm where ``bias`` is None, in float32 or wider.

    Args:
        x: ``[..., hidden]``.
        scale: ``[hidden]``.
        bias: ``[hidden]``; None divides by the root of the mean square and adds nothing.
        eps: Added to the mean square.
    """
    return _norm_forward(x, scale, bias, eps)[0]


def _norm_forward(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> tuple[jax.Array, Residuals]:
    wide = _wide(x)
    mean = None if bias is None else jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide if mean is None else wide - mean
    rate = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = centred * rate * scale
    return (y if bias is None else y + bias).astype(x.dtype), (x, scale, mean, rate)


def _norm_backward(eps: float, kept: Residuals, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, scale, mean, rate = kept
    wide = _wide(grad)
    normal = (_wide(x) if mean is None else _wide(x) - mean) * rate
    inner = wide * scale
    least = normal * jnp.mean(inner * normal, axis=-1, keepdims=True)
    if mean is not None:
        least = least + jnp.mean(inner, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    of_scale, of_bias = jnp.sum(wide * normal, axis=rows), jnp.sum(wide, axis=rows)
    return (
        (rate * (inner - least)).astype(x.dtype),
        of_scale.astype(scale.dtype),
        None if mean is None else of_bias.astype(scale.dtype),
    )


norm.defvjp(_norm_forward, _norm_backward)
gelu = keeping_operands(jax.nn.gelu)


@jax.custom_vjp
def product_in_8_bits(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w`` of operands in E4M3 without scales, cotangents in E5M2 (Micikevicius et al., 2022).

    Args:
        x: ``[..., taken]``.
        w: ``[taken, made]``.

    Returns:
        ``[..., made]`` in the dtype of ``x``.
    """
    return _product_forward(x, w)[0]


def _product_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Residuals]:
    narrow, weight = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
    return jnp.matmul(narrow, weight, preferred_element_type=x.dtype), (narrow, weight)


def _product_backward(kept: Residuals, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    narrow, weight = kept
    back = grad.astype(jnp.float8_e5m2)
    rows = tuple(range(grad.ndim - 1))
    of_x = jax.lax.dot_general(back, weight, (((grad.ndim - 1,), (1,)), ((), ())), preferred_element_type=grad.dtype)
    of_w = jax.lax.dot_general(narrow, back, ((rows, rows), ((), ())), preferred_element_type=grad.dtype)
    return of_x, of_w


product_in_8_bits.defvjp(_product_forward, _product_backward)


@keeping_operands
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``."""
    return jax.nn.silu(gate) * up
