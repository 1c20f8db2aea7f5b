"""`delayed`: gradients of the parameters of some steps ago.

    g(t) = G(W(t - d), batch(t));    W(t+1), opt(t+1) = U(W(t), opt(t), g(t));    W(-d) = ... = W(-1) = W(0)

d = 1 is PipeDream-2BW (Narayanan et al., ICML'21, section 3.1) and the delayed parameter update of ZeRO-Offload (Ren
et al., ATC'21, section 5.2). Momentum and Adam are fed the same gradient; there are no further copies than d older
versions of the parameters. d = 0 is the plain step, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError, TraceError
from autopar.transforms.split import split
from autopar.transforms.state import Parameters, new_state_of, parameter_leaves, replaced, taken


class Correction(Protocol):
    """The correction for the age of a gradient; see `autopar.transforms.corrections`."""

    def __call__(self, gradients: Any, now: Any, read: Any) -> Any:
        """The gradients to update with: of those at ``read``, where the parameters are ``now`` by now."""


class Prediction(Protocol):
    """Parameters to read, made from older ones; see `autopar.transforms.corrections`."""

    #: Versions that it needs besides the one that is read.
    further: int

    def __call__(self, versions: Sequence[Any]) -> Any:
        """One leaf to read, from its versions: the oldest first, last the one that would be read otherwise."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState:
    """The state of a delayed step.

    Args:
        state: the plain step's state, newest.
        versions: older parameters, the oldest first: of each version the leaves.
    """

    state: Any
    versions: tuple[tuple[Any, ...], ...]


class Delayed:
    """A step whose gradients are of older parameters; made by `delayed`."""

    def __init__(
        self,
        step: Callable[..., Any],
        update: Callable[..., Any] | None = None,
        *,
        delay: int = 1,
        params: Parameters = "params",
        correction: Correction | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
            raise AutoparError(f"delay={delay!r} is not a number of steps", remedy="delay=1 is PipeDream-2BW")
        if correction is not None and update is None:
            raise AutoparError(
                "a correction changes gradients, and of a plain step they are not known apart from its other values",
                remedy="give the two apart: delayed(gradients, update, correction=...)",
            )
        self.step = step
        self.plain_update = update
        self.delay = delay
        self.params = params
        self.correction = correction
        self.prediction = prediction
        self.__name__ = f"delayed_{getattr(step, '__name__', 'step')}"

    @property
    def _kept(self) -> int:
        """Versions besides the newest."""
        further = 0 if self.prediction is None or self.delay == 0 else self.prediction.further
        return self.delay + further

    def init(self, state: Any) -> DelayedState:
        """The first state: all versions are the parameters of ``state``, each in memory of its own."""
        leaves = taken(state, parameter_leaves(state, self.params))
        copies = tuple(tuple(jnp.array(leaf, copy=True) for leaf in leaves) for _ in range(self._kept))
        return DelayedState(state, copies)

    def drain(self, state: DelayedState) -> Any:
        """The plain step's state, with nothing in flight: every gradient that was computed is in it.

        A plain step can go on from it. `init` of it begins a new run, whose first gradients are of these parameters.
        """
        return state.state

    def __call__(self, state: DelayedState, *args: Any, **kwargs: Any) -> Any:
        """One step: what the plain step returns, with a `DelayedState` in place of its state."""
        indices = parameter_leaves(state.state, self.params)
        now = taken(state.state, indices)
        read = self._read((*state.versions, now))
        if self.plain_update is None:
            result, place = self._plain(state.state, indices, read, args, kwargs)
        else:
            result, place = self._gradients_and_update(state.state, indices, read, args, kwargs), True
        versions = (*state.versions, now)[1:] if state.versions else ()
        if not place:
            return DelayedState(result, versions)
        return (DelayedState(result[0], versions), *result[1:])

    def _read(self, versions: Sequence[Any]) -> tuple[Any, ...]:
        """The parameters that the gradient is of."""
        if self.prediction is None or self.delay == 0:
            return tuple(versions[0])
        older = versions[: 1 + self.prediction.further]
        return tuple(self.prediction(leaf) for leaf in zip(*older, strict=True))

    def _plain(self, state: Any, indices: Sequence[int], read: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The plain step's result, and whether it is a tuple that begins with the state."""
        step = partial(self.step, **kwargs)
        if self.delay == 0:
            result = step(state, *args)
        else:
            cut = split(step, (state, *args))
            if set(cut.crossing).intersection(
                o for i, o in enumerate(cut.outputs) if i in indices and isinstance(o, int)
            ):
                raise TraceError(
                    "new parameters come out of a loop that differentiates: the update is inside it",
                    cause="the step runs several updates inside a loop",
                    remedy="delay the step of one update, and loop over that",
                )
            rest = jax.tree.leaves(args)
            crossing = cut.gradients([*jax.tree.leaves(replaced(state, indices, read)), *rest])
            result = cut.update([*jax.tree.leaves(state), *rest], crossing)
        return result, new_state_of(state, result)[1] is not None

    def _gradients_and_update(
        self, state: Any, indices: Sequence[int], read: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The new state, and the second result of the gradient step (its metrics)."""
        assert self.plain_update is not None
        gradients, aux = self.step(replaced(state, indices, read), *args, **kwargs)
        if self.correction is not None and self.delay:
            leaves, treedef = jax.tree.flatten(gradients)
            now = taken(state, indices)
            if [g.shape for g in leaves] != [w.shape for w in now]:
                raise AutoparError(
                    "the gradients are not those of the parameters: their shapes differ",
                    remedy="name the parameters that are differentiated: params=...",
                )
            corrected = [self.correction(g, w, r) for g, w, r in zip(leaves, now, read, strict=True)]
            gradients = jax.tree.unflatten(treedef, corrected)
        return self.plain_update(state, gradients), aux


def delayed(
    step: Callable[..., Any] | None = None,
    update: Callable[..., Any] | None = None,
    *,
    delay: int = 1,
    params: Parameters = "params",
    correction: Correction | None = None,
    prediction: Prediction | None = None,
) -> Any:
    """A step whose gradients are of the parameters of ``delay`` steps ago; it changes what is computed.

    Args:
        step: a plain train step ``step(state, *batch) -> (state, *metrics)`` or ``-> state``, or, where ``update`` is
            given, ``step(state, *batch) -> (gradients, metrics)``. None to use as ``@delayed(delay=2)``. Of a plain
            step everything that differentiation does (and what it needs) reads older parameters, all else the newest;
            other state, as statistics of a batch norm, is always the newest.
        update: ``update(state, gradients) -> state``.
        delay: steps d between what the gradient is of and what it is applied to; 1 is PipeDream-2BW, 0 the plain step.
        params: where the parameters are in the state, see `autopar.transforms.Parameters`.
        correction: changes gradients for their age, as `dc_asgd`; only with ``update``.
        prediction: reads parameters that are predicted from older versions, as `Extrapolated`.

    Returns:
        A `Delayed`: ``init(state)``, a call like that of ``step`` on what ``init`` returned, ``drain(state)``.

    Raises:
        AutoparError: an option is wrong; when called, the state has no such parameters.
        TraceError: when called, gradient and update of a plain step cannot be told apart.
    """
    make = partial(Delayed, update=update, delay=delay, params=params, correction=correction, prediction=prediction)
    return make if step is None else make(step)
