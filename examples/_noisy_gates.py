"""Noisy top-k gates (Shazeer et al., 2017): a noisy score chooses the experts of a token; two losses even the load."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ._gates import Routing, _slots


@dataclasses.dataclass(frozen=True)
class NoisyTopK:
    """What a noisy gate decides.

    Attributes:
        gates: ``[groups, tokens, experts]``, weights that add up to 1 over the chosen experts, 0 elsewhere.
        load: ``[groups, tokens, experts]``, probability that a token takes an expert if the noise of that expert is
            drawn again: a smooth count of tokens (appendix A, equation 9).
    """

    gates: jax.Array
    load: jax.Array


def noisy_top_k(logits: jax.Array, noise: jax.Array, choices: int, rng: jax.Array | None = None) -> NoisyTopK:
    """``softmax(KeepTopK(H, k))`` with ``H = logits + eps * softplus(noise)`` (equations 3 to 5).

    Args:
        logits: ``[groups, tokens, experts]``, ``x W_g``; the paper begins with ``W_g = W_noise = 0``.
        noise: ``x W_noise``, likewise.
        choices: Experts a token takes, fewer than there are.
        rng: Key of eps; None is without noise, as in evaluation.
    """
    scale = jax.nn.softplus(noise)
    noisy = logits
    if rng is not None:
        noisy = logits + jax.random.normal(rng, logits.shape, logits.dtype) * scale
    top, index = jax.lax.top_k(noisy, choices + 1)
    chosen = jnp.sum(jax.nn.one_hot(index[..., :choices], logits.shape[-1], dtype=logits.dtype), axis=-2)
    gates = jax.nn.softmax(jnp.where(chosen > 0, noisy, -jnp.inf), axis=-1)
    # The k-th greatest of the others: for a chosen expert the first that is not.
    threshold = jnp.where(chosen > 0, top[..., choices, None], top[..., choices - 1, None])
    return NoisyTopK(gates, jax.scipy.stats.norm.cdf((logits - jax.lax.stop_gradient(threshold)) / scale))


def squared_variation(x: jax.Array) -> jax.Array:
    """``CV(x)^2``, variance over squared mean, of values an expert: what both losses are of (equations 7 and 11)."""
    return jnp.var(x) / (jnp.mean(x) ** 2 + 1e-10)


def noisy_gate(
    logits: jax.Array,
    noise: jax.Array,
    capacity: int,
    choices: int = 2,
    rng: jax.Array | None = None,
    weights: tuple[float, float] = (0.1, 0.1),
) -> Routing:
    """A noisy top-k gate with slots: the first choices of all tokens take theirs before the second choices.

    The paper has no capacity; with enough of it nothing is dropped. The loss is
    ``w_importance CV(sum of gates)^2 + w_load CV(load)^2``, sums over the tokens of all groups.

    Args:
        logits: See `noisy_top_k`.
        noise: Likewise.
        capacity: Slots an expert has in a group.
        choices: Experts a token takes.
        rng: Key of the noise.
        weights: ``(w_importance, w_load)``; the paper takes 0.1 for both.
    """
    decided = noisy_top_k(logits, noise, choices, rng)
    loss = weights[0] * squared_variation(jnp.sum(decided.gates, axis=(0, 1)))
    loss = loss + weights[1] * squared_variation(jnp.sum(decided.load, axis=(0, 1)))
    _, index = jax.lax.top_k(decided.gates, choices)
    dispatch = jnp.zeros((*logits.shape, capacity), logits.dtype)
    taken = jnp.zeros((logits.shape[0], 1, logits.shape[-1]), logits.dtype)
    for choice in range(choices):
        chosen = jax.nn.one_hot(index[..., choice], logits.shape[-1], dtype=logits.dtype)
        dispatch = dispatch + _slots(chosen, taken, capacity)
        taken = taken + jnp.sum(chosen, axis=1, keepdims=True)
    return Routing(combine=decided.gates[..., None] * dispatch, dispatch=dispatch, loss=loss)


def hierarchical(primary: NoisyTopK, secondary: NoisyTopK) -> NoisyTopK:
    """Gates over groups of experts, and in each group over its experts (appendix B).

    ``G_ij = G_i G_ij``. The load of expert j of group i over all tokens is
    ``Load_i * sum over tokens that take group i of load_ij / their number``; here each token has its part of it, so
    that sums over tokens are the paper's.

    Args:
        primary: Over a groups of experts: ``[groups, tokens, a]``.
        secondary: Over b experts of each: ``[groups, tokens, a, b]``.

    Returns:
        Gates and load over ``a * b`` experts.
    """
    takes = (primary.gates > 0).astype(primary.load.dtype)
    share = jnp.sum(primary.load, axis=(0, 1)) / jnp.maximum(jnp.sum(takes, axis=(0, 1)), 1)
    gates = primary.gates[..., None] * secondary.gates
    load = (takes * share)[..., None] * secondary.load
    shape = (*gates.shape[:2], math.prod(gates.shape[2:]))
    return NoisyTopK(gates.reshape(shape), load.reshape(shape))
