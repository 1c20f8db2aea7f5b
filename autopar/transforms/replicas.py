"""`per_replica`: a step on k replicas of its state, each with its own part of the batch.

The replicas are a leading dim of size k on every leaf of the state and on the batch (`jax.vmap`). A plan that splits
that dim over an axis of the mesh keeps each replica on its own devices, and nothing crosses until somebody takes a mean
over it. `local_sgd`, `diloco`, `powersgd` and `one_bit_adam` are made of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError


def check_replicas(replicas: Any) -> int:
    """``replicas`` if it is a count.

    Raises:
        AutoparError: it is not.
    """
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise AutoparError(f"replicas={replicas!r} is no count", remedy="give a positive number of replicas")
    return replicas


def replicate(tree: Any, replicas: int) -> Any:
    """``tree`` with a leading dim of ``replicas`` equal entries on every leaf; of typed random keys the entries differ.

    The first replica has the keys of ``tree``, replica i those that `jax.random.fold_in` makes of them and i.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            if replicas == 1:
                return leaf[None]
            others = jax.vmap(lambda i: jax.random.fold_in(leaf, i))(jnp.arange(1, replicas))
            return jnp.concatenate([leaf[None], others])
        return jnp.repeat(jnp.asarray(leaf)[None], replicas, axis=0)

    return jax.tree.map(one, tree)


def divided(batch: Any, replicas: int) -> Any:
    """``batch`` with its first dim as ``[replicas, examples a replica]``; leaves without dims as they are.

    Raises:
        AutoparError: the first dim of some leaf is not divisible.
    """

    def one(path: Any, leaf: Any) -> Any:
        if jnp.ndim(leaf) == 0:
            return leaf
        leaf = jnp.asarray(leaf)
        if leaf.shape[0] % replicas:
            raise AutoparError(
                f"batch{jax.tree_util.keystr(path)} has {leaf.shape[0]} examples for {replicas} replicas",
                remedy="give a batch whose first dim is divisible by the number of replicas",
            )
        return leaf.reshape(replicas, leaf.shape[0] // replicas, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(one, batch)


def first(tree: Any) -> Any:
    """The first replica of a replicated tree."""
    return jax.tree.map(lambda x: x[0], tree)


class PerReplica:
    """A step on replicas; made by `per_replica`."""

    def __init__(self, step: Callable[..., Any], replicas: int) -> None:
        self.step = step
        self.replicas = check_replicas(replicas)
        self.__name__ = f"{getattr(step, '__name__', 'step')}_per_replica"

    def init(self, state: Any) -> Any:
        """The state of all replicas: k times ``state``; see `replicate`."""
        return replicate(state, self.replicas)

    def __call__(self, states: Any, *batch: Any) -> Any:
        """One step of every replica: the step's results, each leaf with a leading dim of replicas."""
        parts = divided(batch, self.replicas)
        if self.replicas == 1:  # as the plain step, to the bit
            alone = self.step(first(states), *jax.tree.map(_only, parts, batch))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], alone)
        return jax.vmap(self.step, in_axes=(0, *_dims(parts, batch)))(states, *parts)


def per_replica(step: Callable[..., Any], replicas: int) -> PerReplica:
    """``step`` on replicas of its state, each with its own part of the batch; nothing goes between them.

    Args:
        step: ``step(state, *batch)``, which returns a pytree of arrays. Leaves of the batch without dims (a random key,
            a rate) go to all replicas.
        replicas: how many, k. The first dim of the batch has to be divisible by it.
    """
    return PerReplica(step, replicas)


def per_replica_value_and_grad(
    fun: Callable[..., Any], replicas: int, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of the parts of a batch: values and gradients have a leading dim of replicas.

    The parameters are one for all, and nothing is summed: the mean of the gradients is the gradient of the whole batch
    where the loss is a mean over examples. For `powersgd` and `one_bit_adam`.

    Args:
        fun: ``fun(params, *batch)``, a loss (and more with ``has_aux``).
        replicas: how many parts, k.
        has_aux: as in `jax.value_and_grad`.
    """
    check_replicas(replicas)
    grad = jax.value_and_grad(fun, has_aux=has_aux)

    def value_and_grad(params: Any, *batch: Any) -> tuple[Any, Any]:
        parts = divided(batch, replicas)
        result: tuple[Any, Any] = jax.vmap(grad, in_axes=(None, *_dims(parts, batch)))(params, *parts)
        return result

    return value_and_grad


def _dims(parts: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, ...]:
    """The mapped dim of each leaf; leaves without dims are for all."""
    return tuple(
        jax.tree.map(lambda _, leaf: 0 if jnp.ndim(leaf) else None, p, b) for p, b in zip(parts, batch, strict=True)
    )


def _only(part: Any, leaf: Any) -> Any:
    return part[0] if jnp.ndim(leaf) else part
