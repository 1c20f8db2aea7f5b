"""`diloco` and `local_sgd`: replicas that train by themselves and agree every H steps.

DiLoCo (Douillard et al., 2023): with inner steps theta_i of k replicas from theta,

    D = mean_i(theta - theta_i);   v = mu v + D;   theta = theta - eta (mu v + D);   theta_i = theta

Moments of the inner optimizer stay with their replicas. Streaming DiLoCo (Douillard et al., 2025): the parameters are
in P fragments; fragment p is due at steps t with t mod H = p H / P, its result is taken tau steps later as
``theta_i = alpha theta_i + (1 - alpha) theta``, and D is sent in few bits. Local SGD (Stich, 2019) is eta = 1, mu = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError
from autopar.transforms.formats import Format, format_of
from autopar.transforms.replicas import first, per_replica
from autopar.transforms.state import Parameters, leaf_paths, parameter_leaves, replaced, taken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
    """The state of `Diloco`.

    Args:
        replicas: the inner states, every leaf with a leading dim of replicas.
        outer: the parameters theta that the replicas agreed on: leaves.
        velocity: v, likewise.
        count: inner steps done.
    """

    replicas: Any
    outer: tuple[Any, ...]
    velocity: tuple[Any, ...]
    count: Any


@dataclass(frozen=True)
class Streaming:
    """Fragments of the parameters that are exchanged at different times.

    Args:
        fragments: their number P.
        overlap_steps: inner steps tau between sending a fragment and taking the result.
        mixing: alpha, how much of a replica's own fragment stays when the result is taken.
        fragment_of: number of the fragment of a leaf, from its path; None deals leaves out in turn.
        offsets: by fragment the step within the period at which it is due; None spreads them evenly.
    """

    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    fragment_of: Callable[[str], int] | None = None
    offsets: tuple[int, ...] | None = None


class Diloco:
    """Replicas with an outer optimizer; made by `diloco`."""

    def __init__(
        self,
        step: Callable[..., Any],
        replicas: int,
        period: int,
        outer_rate: float,
        outer_momentum: float,
        streaming: Streaming,
        format: Format | None,
        params: Parameters,
    ) -> None:
        self.step = per_replica(step, replicas)
        self.replicas = replicas
        self.period = period
        self.rate = outer_rate
        self.momentum = outer_momentum
        self.streaming = streaming
        self.format = format
        self.params = params
        spread = tuple(p * period // streaming.fragments for p in range(streaming.fragments))
        self.offsets = spread if streaming.offsets is None else streaming.offsets
        self.__name__ = f"diloco_{getattr(step, '__name__', 'step')}"
        _check(self)

    def init(self, state: Any) -> DilocoState:
        """All replicas begin at ``state``."""
        theta = taken(state, parameter_leaves(state, self.params))
        outer = tuple(jnp.array(leaf, copy=True) for leaf in theta)
        return DilocoState(
            self.step.init(state), outer, tuple(jnp.zeros_like(leaf) for leaf in outer), jnp.zeros((), jnp.int32)
        )

    def __call__(self, state: DilocoState, *batch: Any) -> tuple[DilocoState, Any]:
        """An inner step, then what is due: ``(state, metrics of every replica)``.

        Collectives between replicas lie in branches. Where even those may not be in the program, plan `inner`, `outer`
        and `merge` apart and ask `due` and `merging` which to run.
        """
        state, metrics = self.inner(state, *batch)
        for p in range(self.streaming.fragments):
            state = jax.lax.cond(self._is_due(state.count, p), partial(self.outer, fragment=p), _same, state)
        for p in range(self.streaming.fragments):
            late = self._is_due(state.count - self.streaming.overlap_steps, p)
            state = jax.lax.cond(late, partial(self.merge, fragment=p), _same, state)
        return state, metrics

    def inner(self, state: DilocoState, *batch: Any) -> tuple[DilocoState, Any]:
        """A step of every replica; nothing goes between them."""
        results = self.step(state.replicas, *batch)
        like: Any = jax.tree.structure(state.replicas)
        if jax.tree.structure(results) == like:
            states, metrics = results, ()
        else:
            states, *rest = results
            metrics = rest[0] if len(rest) == 1 else tuple(rest)
        return replace(state, replicas=states, count=state.count + 1), metrics

    def outer(self, state: DilocoState, fragment: int = 0, alive: Any = None) -> DilocoState:
        """The outer step of one fragment; the replicas take it by `merge`.

        Args:
            state: the state.
            fragment: its number.
            alive: ``[replicas]``, 0 for those that do not count (islands that are lost); None counts all.
        """
        indices = parameter_leaves(state.replicas, self.params)
        local = taken(state.replicas, indices)
        outer, velocity = list(state.outer), list(state.velocity)
        for n in self._members(state, indices, fragment):
            outer[n], velocity[n] = self._outer_leaf(outer[n], velocity[n], local[n], alive)
        return replace(state, outer=tuple(outer), velocity=tuple(velocity))

    def merge(self, state: DilocoState, fragment: int = 0) -> DilocoState:
        """Every replica takes one fragment of the outer parameters."""
        indices = parameter_leaves(state.replicas, self.params)
        local, alpha = list(taken(state.replicas, indices)), self.streaming.mixing
        for n in self._members(state, indices, fragment):
            theta = jnp.broadcast_to(state.outer[n][None], local[n].shape)
            local[n] = alpha * local[n] + (1 - alpha) * theta if alpha else theta
        return replace(state, replicas=replaced(state.replicas, indices, local))

    def due(self, steps_done: int) -> tuple[int, ...]:
        """Fragments whose `outer` runs after so many inner steps."""
        return tuple(p for p in range(self.streaming.fragments) if bool(self._is_due(steps_done, p)))

    def merging(self, steps_done: int) -> tuple[int, ...]:
        """Fragments whose `merge` runs after so many inner steps, after what is `due`."""
        return self.due(steps_done - self.streaming.overlap_steps)

    def drain(self, state: DilocoState) -> Any:
        """The plain step's state: the outer parameters, all else of the first replica."""
        indices = parameter_leaves(state.replicas, self.params)
        return replaced(first(state.replicas), indices, state.outer)

    def bytes_a_step(self, state: Any) -> float:
        """Bytes that a replica sends a step on average: ``|W| bits / 8 / H``, of the plain step's ``state``."""
        leaves = taken(state, parameter_leaves(state, self.params))
        bits = (
            32.0 if self.format is None else self.format.bits(leaf.shape[-1] if leaf.ndim else 1) for leaf in leaves
        )
        return sum(float(leaf.size * b) for leaf, b in zip(leaves, bits, strict=True)) / 8 / self.period

    def _outer_leaf(self, theta: Any, velocity: Any, local: Any, alive: Any) -> tuple[Any, Any]:
        """New theta and v of one leaf."""
        if self.format is None:
            mean = _mean(local, alive)
            step = theta - mean
        else:
            rounded = self.format.rounded(_with_dim(theta[None] - local)).reshape(local.shape)
            step = _mean(rounded, alive)
            mean = theta - step
        velocity = self.momentum * velocity + step
        # The same as theta - eta (mu v + D), and at eta = 1 and mu = 0 the mean itself, to the bit.
        new = mean if self.rate == 1 else (1 - self.rate) * theta + self.rate * mean
        return new - self.rate * self.momentum * velocity if self.momentum else new, velocity

    def _members(self, state: DilocoState, indices: Sequence[int], fragment: int) -> list[int]:
        """Whether each parameter is in a fragment."""
        paths = leaf_paths(state.replicas)
        of = self.streaming.fragment_of
        numbers = [n % self.streaming.fragments if of is None else of(paths[i]) for n, i in enumerate(indices)]
        return [n for n, number in enumerate(numbers) if number == fragment]

    def _is_due(self, steps_done: Any, fragment: int) -> Any:
        offset = self.offsets[fragment]
        return (steps_done >= (offset or self.period)) & ((steps_done - offset) % self.period == 0)


def diloco(
    step: Callable[..., Any],
    replicas: int,
    period: int,
    *,
    outer_rate: float = 0.7,
    outer_momentum: float = 0.9,
    streaming: Streaming | None = None,
    format: str | Format | None = None,
    params: Parameters = "params",
) -> Diloco:
    """``step`` on replicas that exchange parameters every ``period`` steps; it changes what is computed.

    Args:
        step: a plain train step ``step(state, *batch) -> (state, metrics)`` of one replica, with its inner optimizer.
        replicas: their number k.
        period: inner steps H between two exchanges.
        outer_rate: eta.
        outer_momentum: mu, of Nesterov's kind.
        streaming: fragments that are exchanged at different times; None exchanges all at once.
        format: of what each replica sends, as "int4"; None sends parameters as they are.
        params: where the parameters are in the state, see `autopar.transforms.Parameters`.

    Raises:
        AutoparError: an option is wrong.
    """
    return Diloco(
        step, replicas, period, outer_rate, outer_momentum, streaming or Streaming(), format_of(format), params
    )


def local_sgd(step: Callable[..., Any], replicas: int, period: int, *, params: Parameters = "params") -> Diloco:
    """``step`` on replicas whose parameters are averaged every ``period`` steps; moments stay local.

    Args:
        step: a plain train step of one replica.
        replicas: their number k.
        period: steps H between two averages.
        params: where the parameters are in the state.
    """
    return diloco(step, replicas, period, outer_rate=1.0, outer_momentum=0.0, params=params)


def _check(self: Diloco) -> None:
    streaming, period = self.streaming, self.period
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise AutoparError(
            f"period={period!r} is not a number of steps", remedy="give a positive number of inner steps"
        )
    if not 1 <= streaming.fragments <= period and streaming.offsets is None:
        raise AutoparError(
            f"{streaming.fragments} fragments do not fit into a period of {period} steps",
            remedy="give at most as many fragments as inner steps, or their offsets",
        )
    if len(self.offsets) != streaming.fragments or not all(0 <= o < period for o in self.offsets):
        raise AutoparError(
            f"offsets={self.offsets} are not one for each of {streaming.fragments} fragments in 0..{period - 1}"
        )
    if not 0 <= streaming.overlap_steps < period:
        raise AutoparError(
            f"overlap_steps={streaming.overlap_steps} is not within a period of {period} steps",
            cause="a fragment would be sent again before its result is taken",
        )
    if not 0 <= streaming.mixing < 1:
        raise AutoparError(
            f"mixing={streaming.mixing} is not in [0, 1)", remedy="0 takes the outer parameters as they are"
        )


def _mean(x: Any, alive: Any) -> Any:
    if alive is None:
        return jnp.mean(x, axis=0)
    weights = jnp.asarray(alive, x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, x * weights, 0), axis=0) / jnp.sum(weights)


def _with_dim(x: Any) -> Any:
    """``x`` with a last dim to make blocks of, besides that of replicas."""
    return x[:, None] if x.ndim == 1 else x


def _same(state: DilocoState) -> DilocoState:
    return state
