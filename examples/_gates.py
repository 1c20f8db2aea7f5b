"""Gates of a mixture of experts: which expert takes which token, in which slot, with which weight."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Routing:
    """The decisions of a gate.

    Attributes:
        combine: ``[groups, tokens, experts, capacity]``, weight of the output of a slot in a token; 0 elsewhere.
        dispatch: Same shape, 1 where the token takes the slot, else 0.
        loss: Scalar, the auxiliary loss that balances the experts.
    """

    combine: jax.Array
    dispatch: jax.Array
    loss: jax.Array


def expert_capacity(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Slots that an expert has for the tokens of a group: ``ceil(choices * factor * tokens / experts)``.

    Args:
        tokens: Tokens a group.
        experts: Experts.
        choices: Experts a token asks for: 2 in GShard, 1 in Switch.
        factor: Capacity factor; 1 is exactly enough when the load is even.
    """
    return max(1, math.ceil(choices * factor * tokens / experts))


def gshard_gate(logits: jax.Array, capacity: int, rng: jax.Array | None = None) -> Routing:
    """Top-2 gating (GShard, algorithm 1).

    The weights of the two experts are normalised over the pair. First choices take slots in token order, then
    second choices take what is left; a choice that finds its expert full is dropped. The loss is
    ``mean_e(c_e / S * m_e)`` with ``c_e`` the first choices of expert e (dropped ones too), ``S`` the tokens of the
    group and ``m_e`` the mean gate, averaged over groups.

    Args:
        logits: ``[groups, tokens, experts]``, float32 or wider.
        capacity: Slots an expert has in a group.
        rng: Key of random routing: the second expert is kept with probability ``min(1, 2 * weight)``. A choice
            rejected so takes no slot. None keeps every second expert.
    """
    experts = logits.shape[-1]
    gates = jax.nn.softmax(logits, axis=-1)
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=gates.dtype)
    # By logits and not by gates: a gate that underflowed to 0 must still lose to no first choice.
    rest = jnp.where(first > 0, -jnp.inf, logits)
    second = jax.nn.one_hot(jnp.argmax(rest, axis=-1), experts, dtype=gates.dtype)
    gate1 = jnp.sum(gates * first, axis=-1, keepdims=True)
    gate2 = jnp.sum(gates * second, axis=-1, keepdims=True)
    weight1, weight2 = gate1 / (gate1 + gate2), gate2 / (gate1 + gate2)
    loss = jnp.mean(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1))
    if rng is not None:
        second = second * (jax.random.uniform(rng, weight2.shape, weight2.dtype) < 2.0 * weight2)
    taken = jnp.sum(first, axis=1, keepdims=True)
    slots1 = _slots(first, jnp.zeros_like(taken), capacity)
    slots2 = _slots(second, taken, capacity)
    combine = weight1[..., None] * slots1 + weight2[..., None] * slots2
    return Routing(combine=combine, dispatch=slots1 + slots2, loss=loss)


def switch_gate(logits: jax.Array, capacity: int) -> Routing:
    """Top-1 gating (Switch Transformer, section 2.2).

    Tokens take slots in order; a token that finds its expert full is dropped. The loss is
    ``N * sum_i(f_i * P_i)`` (equation 4 without alpha) with ``N`` experts, ``f_i`` the fraction of tokens that
    choose expert i and ``P_i`` its mean gate, averaged over groups.

    Args:
        logits: ``[groups, tokens, experts]``, float32 or wider.
        capacity: Slots an expert has in a group.
    """
    experts = logits.shape[-1]
    gates = jax.nn.softmax(logits, axis=-1)
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=gates.dtype)
    weight = jnp.sum(gates * first, axis=-1, keepdims=True)
    balance = jnp.sum(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1), axis=-1)
    slots = _slots(first, jnp.zeros_like(first[:, :1]), capacity)
    return Routing(combine=weight[..., None] * slots, dispatch=slots, loss=experts * jnp.mean(balance))


def _slots(chosen: jax.Array, taken: jax.Array, capacity: int) -> jax.Array:
    """One-hot slots ``[groups, tokens, experts, capacity]`` of the choices that find room.

    Args:
        chosen: One-hot choices ``[groups, tokens, experts]``.
        taken: Slots in use before, ``[groups, 1, experts]``.
        capacity: Slots an expert has.
    """
    position = jnp.cumsum(chosen, axis=1) - chosen + taken
    # one_hot gives zeros for a position at or past capacity: the choice is dropped.
    return chosen[..., None] * jax.nn.one_hot(position.astype(jnp.int32), capacity, dtype=chosen.dtype)
