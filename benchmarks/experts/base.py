"""`Expert`: a sharding written by hand with plain `NamedSharding`, and how it is compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar._compat.primitives import bind

Shape = tuple[int, ...]
WeightRule = Callable[[str, Shape], P]
"""(path of a state leaf, its shape) -> its layout."""

AXES = ("x", "y")


@dataclass(frozen=True)
class Expert:
    """A sharding written by hand.

    Args:
        name: of the scheme.
        mesh: sizes of the axes "x" (and "y").
        weights: layout of every state leaf, parameters and optimizer state alike.
        batch: layout of the batch leaves (cut to their rank).
        activations: layouts of intermediate values by shape, as constraints; others are left to XLA.
    """

    name: str
    mesh: tuple[int, ...]
    weights: WeightRule
    batch: P
    activations: Mapping[Shape, P] = field(default_factory=dict)


def replicated(path: str, shape: Shape) -> P:
    """Every leaf whole on every device."""
    del path, shape
    return P()


def by_pattern(patterns: Sequence[tuple[str, P]], otherwise: WeightRule = replicated) -> WeightRule:
    """The layout of the first regular expression that is found in a leaf's path."""

    def rule(path: str, shape: Shape) -> P:
        for pattern, spec in patterns:
            if re.search(pattern, path) and len(spec) <= len(shape):
                return spec
        return otherwise(path, shape)

    return rule


def fully_sharded(axes: tuple[str, ...], n: int, smallest: int = 1) -> WeightRule:
    """FSDP / ZeRO-3: every leaf split over ``axes`` (``n`` devices) along its largest dim that they divide."""

    def rule(path: str, shape: Shape) -> P:
        del path
        fitting = [d for d, size in enumerate(shape) if size % n == 0]
        if not fitting or math.prod(shape) < smallest:
            return P()
        dim = max(fitting, key=lambda d: (shape[d], -d))
        return P(*(None,) * dim, axes)

    return rule


def when(pattern: str, inside: WeightRule, otherwise: WeightRule) -> WeightRule:
    """``inside`` for paths in which ``pattern`` is found."""
    return lambda path, shape: (inside if re.search(pattern, path) else otherwise)(path, shape)


def device_mesh(shape: tuple[int, ...]) -> Mesh:
    """The first devices of this process as an Auto mesh with axes "x", "y"."""
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def compile_expert(expert: Expert, step: Callable[..., Any], args: tuple[Any, Any]) -> Any:
    """The compiled program of a train step ``(state, batch) -> (state, metrics)`` with the expert's layouts.

    Args:
        expert: the layouts.
        step: plain train step.
        args: state and batch, as `jax.ShapeDtypeStruct`.
    """
    mesh = device_mesh(expert.mesh)
    state, batch = args
    state_layout = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, expert.weights(jax.tree_util.keystr(path), leaf.shape)), state
    )
    batch_layout = jax.tree.map(lambda leaf: NamedSharding(mesh, P(*expert.batch[: leaf.ndim])), batch)
    function = constrained(step, mesh, expert.activations) if expert.activations else step
    jitted = jax.jit(
        function,
        in_shardings=(state_layout, batch_layout),
        out_shardings=(state_layout, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return jitted.lower(state, batch).compile()


def constrained(
    step: Callable[..., Any], mesh: Mesh, activations: Mapping[Shape, P]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``step`` with a sharding constraint on every intermediate value whose shape is in ``activations``."""

    def whole(state: Any, batch: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
        leaves = jax.tree.leaves((state, batch))
        results = _evaluate(closed.jaxpr, closed.consts, leaves, mesh, activations)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return whole


def _evaluate(jaxpr: Any, consts: Any, args: Sequence[Any], mesh: Mesh, activations: Mapping[Shape, P]) -> list[Any]:
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call") and inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, values, mesh, activations)
        else:
            results = bind(eqn.primitive, eqn.params, values)
        for var, value in zip(eqn.outvars, results, strict=True):
            spec = activations.get(getattr(value, "shape", ()))
            known[var] = value if spec is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
    return [read(v) for v in jaxpr.outvars]
