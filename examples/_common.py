"""What the examples share: presets, building of arguments, attention, losses.

Parameters are kept in float32 (the master copy) and cast to ``dtype`` where they are used. With
``dtype="float64"`` every floating leaf is float64. No example scales its loss for float16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp

from . import _kernels

if TYPE_CHECKING:
    import optax

ConfigT = TypeVar("ConfigT")
Tree: TypeAlias = Any
"""A pytree that ``jax.jit`` takes: nested dicts, tuples and arrays."""
TrainStep: TypeAlias = Callable[[Tree, Tree], tuple[Tree, dict[str, jax.Array]]]
"""``(state, batch) -> (state, metrics)``; metrics holds at least ``"loss"``."""

#: Types of fields whose values are checked.
_PLAIN = {bool, int, float, str, NoneType}


def resolve(presets: Mapping[str, ConfigT], preset: str, overrides: Mapping[str, Any]) -> ConfigT:
    """The configuration of a preset with some fields replaced.

    Args:
        presets: The module's table, name to frozen dataclass.
        preset: A name in the table.
        overrides: Field name to value. ``dtype`` may be a string or a dtype.

    Raises:
        ValueError: No such preset.
        TypeError: An override is not a field of the configuration, or a value is not of the field's type.
    """
    if preset not in presets:
        raise ValueError(f"no preset {preset!r}; known: {', '.join(presets)}")
    config = presets[preset]
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    known = [field.name for field in dataclasses.fields(config)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(f"unknown override {', '.join(unknown)}; known: {', '.join(known)}")
    values = dict(overrides)
    if "dtype" in values:
        values["dtype"] = jnp.dtype(values["dtype"]).name
    hints = get_type_hints(type(config))
    for name, value in values.items():
        _check_kind(name, value, getattr(config, name), hints[name])
    return dataclasses.replace(config, **values)


def _check_kind(name: str, value: Any, usual: Any, hint: Any) -> None:
    """Raises TypeError unless ``value`` is of the type ``hint`` of a field; counts are not negative."""
    kinds, kind = get_args(hint) or (hint,), type(value)
    if kind is not bool and isinstance(value, Real):
        kind = int if isinstance(value, Integral) else float
    fits = kind in kinds or (kind is int and float in kinds) or not _PLAIN.issuperset(kinds)
    if not fits or (kind is int and value < 0):
        raise TypeError(f"{name}={value!r} is no value of {name}, which is {usual!r} in this preset")


def dtypes(name: str) -> tuple[jnp.dtype[Any], jnp.dtype[Any]]:
    """The dtypes of the parameters and of the computation.

    Args:
        name: "float16", "bfloat16", "float32" or "float64".

    Returns:
        ``(parameters, computation)``: float32 parameters for everything but float64.

    Raises:
        ValueError: float64 without ``jax_enable_x64`` (jax would quietly give float32), or not a float dtype.
    """
    compute = jnp.dtype(name)
    if not jnp.issubdtype(compute, jnp.floating):
        raise ValueError(f"dtype={name!r} is not a floating dtype")
    if jax.dtypes.canonicalize_dtype(compute) != compute:
        raise ValueError("dtype='float64' needs jax.config.update('jax_enable_x64', True) before build()")
    return jnp.promote_types(compute, jnp.float32), compute


def materialize(create: Callable[[], Tree], abstract: bool) -> Tree:
    """The result of ``create()``, or its shapes.

    Args:
        create: Makes the arguments of a train step; takes nothing, so its seed is inside.
        abstract: Return ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
    """
    # Not under jit: op by op, the programs that draw numbers are compiled once a shape and shared by all builds.
    return jax.eval_shape(create) if abstract else create()


def count_params(params: Tree) -> int:
    """The number of scalars in a pytree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: Any) -> jax.Array:
    """A parameter drawn from a normal distribution with mean 0 and deviation ``std``."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)


def token_batch(key: jax.Array, batch: int, seq: int, vocab: int) -> dict[str, jax.Array]:
    """Random tokens and the labels of next-token prediction.

    Args:
        key: A typed PRNG key.
        batch: Sequences.
        seq: Tokens a sequence.
        vocab: Tokens are in ``[0, vocab)``.

    Returns:
        ``{"tokens": int32[batch, seq], "labels": int32[batch, seq]}``; labels are tokens shifted by one.
    """
    text = jax.random.randint(key, (batch, seq + 1), 0, vocab, dtype=jnp.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def token_loss(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy of next-token prediction, in float32 or wider.

    Args:
        logits: ``[batch, seq, vocab]``.
        labels: int ``[batch, seq]``.
        mask: Weights ``[batch, seq]``; the mean is over the tokens with weight. None counts every token.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # One-hot rather than a gather: a vocabulary dim that is split over devices stays split.
    picked = jnp.sum(logits * jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    if mask is None:
        return jnp.mean(losses)
    weights = mask.astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, by_hand: bool = False) -> jax.Array:
    """Causal softmax attention with grouped key and value heads.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, seq, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        v: As ``k``.
        by_hand: Differentiate the softmax as kernels do that are written by hand (``_kernels``).

    Returns:
        ``[batch, seq, heads, head_dim]`` in the dtype of ``q``. The softmax is in float32 or wider.
    """
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    visible = jnp.tril(jnp.ones((seq, seq), dtype=bool))
    softmax = _kernels.masked_softmax if by_hand else _masked_softmax
    if kv_heads == heads:
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k)
        return jnp.einsum("bhqs,bshd->bqhd", softmax(scores, visible, head_dim), v)
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k)
    out = jnp.einsum("bkgqs,bskd->bqkgd", softmax(scores, visible, head_dim), v)
    return out.reshape(batch, seq, heads, head_dim)


def _masked_softmax(scores: jax.Array, visible: jax.Array, head_dim: int) -> jax.Array:
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * (1.0 / math.sqrt(head_dim))
    # Every token sees itself, so that no row is all -inf.
    return jax.nn.softmax(jnp.where(visible, wide, -jnp.inf), axis=-1).astype(scores.dtype)


def check_divides(**pairs: tuple[int, int]) -> None:
    """Check that each second number divides the first.

    Args:
        pairs: ``what=(whole, part)``; ``what`` is used in the message, underscores shown as spaces.

    Raises:
        ValueError: A part is not positive or does not divide its whole.
    """
    for what, (whole, part) in pairs.items():
        if part < 1 or whole % part:
            raise ValueError(f"{what.replace('_', ' ')}: {whole} is not a multiple of {part}")


def apply_optimizer(optimizer: optax.GradientTransformation, state: Mapping[str, Tree], grads: Tree) -> dict[str, Tree]:
    """One optimizer step on a state ``{"params", "opt_state", "step", ...}``; other entries are kept."""
    import optax  # here, so that the perceptron with its own momentum needs no package beside autopar

    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt_state": opt_state, "step": state["step"] + 1}


def train_state(optimizer: optax.GradientTransformation, params: Tree) -> dict[str, Tree]:
    """A fresh state: ``{"params", "opt_state", "step"}`` with ``step`` an int32 scalar."""
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
