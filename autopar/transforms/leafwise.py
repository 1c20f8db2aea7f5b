"""A proof that an optimizer treats each parameter alone, from one trace of its update.

What each value depends on is followed through the traced update: the gradient, the parameter and the moments of a leaf
may reach the update and the moments of that leaf alone, and state that leaves share may depend on no leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as JaxLiteral

from autopar.errors import AutoparError
from autopar.transforms.parameters import leaf_paths

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_RANDOM = ("random_", "threefry2x32", "rng_")

#: A set of parameters as the bits of a number.
Leaves: TypeAlias = int


def alone(tree: Any, number: int) -> Any:
    """``tree`` with the leaf of that number, and nothing in place of the others."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf if i == number else () for i, leaf in enumerate(leaves)])


def check_leafwise(init: Callable[[Any], Any], update: Callable[..., Any], params: Any) -> None:
    """Refuses an optimizer that mixes parameters.

    Args:
        init: of the optimizer.
        update: of the optimizer.
        params: parameters, or their shapes.

    Raises:
        AutoparError: an update reads what belongs to another parameter, or draws random numbers; it has the paths.
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    names = leaf_paths(shapes)
    whole = jax.eval_shape(init, shapes)
    places: dict[str, Leaves] = {}
    for i in range(len(names)):
        for path in leaf_paths(jax.eval_shape(init, alone(shapes, i))):
            places[path] = places.get(path, 0) | 1 << i
    each = [1 << i for i in range(len(names))]
    owners = [_owner(places.get(path, 0)) for path in leaf_paths(whole)] if len(names) > 1 else [1] * len(places)
    closed, _ = jax.make_jaxpr(update, return_shape=True)(shapes, whole, shapes)
    if any(_draws(closed.jaxpr)):
        raise AutoparError(
            "on_disk: the optimizer draws random numbers for all parameters together",
            cause="noise is added inside of it",
            remedy="add noise outside: optax.chain(optax.add_noise(...), on_disk(...))",
        )
    results = _reached(closed.jaxpr, [*each, *owners, *each])
    allowed = [*each, *owners]
    if len(results) != len(allowed):
        raise AutoparError(f"on_disk: {len(each)} gradients and {len(owners)} leaves of state make {len(results)}")
    for path, got, may in zip([*names, *leaf_paths(whole)], results, allowed, strict=True):
        if got & ~may:
            read = [name for i, name in enumerate(names) if got & ~may & 1 << i]
            raise AutoparError(
                f"on_disk: the optimizer mixes parameters: what it makes of {path} depends on {', '.join(read[:3])}",
                cause="a norm over all gradients, as clipping needs it, is inside of it",
                remedy="put it outside: optax.chain(optax.clip_by_global_norm(...), on_disk(...))",
            )


def _owner(leaves: Leaves) -> Leaves:
    """The one leaf that has a piece of state; none where several share it."""
    return leaves if leaves.bit_count() == 1 else 0


def _reached(jaxpr: Jaxpr, operands: Sequence[Leaves]) -> list[Leaves]:
    """The leaves that each result depends on; calls and branches are followed inside, loops are as one operator."""
    env: dict[Any, Leaves] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        given = [0 if isinstance(v, JaxLiteral) else env.get(v, 0) for v in eqn.invars]
        bodies = [b for b in _bodies(eqn) if eqn.primitive.name in _CALLS and len(b.invars) == len(given)]
        if eqn.primitive.name == "cond":
            predicate, *rest = given
            branches = [_reached(b, rest) for b in _bodies(eqn)]
            results = [predicate | _union(way) for way in zip(*branches, strict=True)]
        elif bodies:
            results = _reached(bodies[0], given)
        else:
            results = [_union(given)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [0 if isinstance(v, JaxLiteral) else env.get(v, 0) for v in jaxpr.outvars]


def _union(sets: Sequence[Leaves]) -> Leaves:
    union = 0
    for leaves in sets:
        union |= leaves
    return union


def _draws(jaxpr: Jaxpr) -> Sequence[bool]:
    """For each equation, in bodies too, whether it makes random numbers or keys."""
    return [e.primitive.name.startswith(_RANDOM) or any(any(_draws(b)) for b in _bodies(e)) for e in jaxpr.eqns]


def _bodies(eqn: Any) -> list[Jaxpr]:
    values = [b for v in eqn.params.values() for b in (v if isinstance(v, tuple | list) else (v,))]
    jaxprs = [b.jaxpr if isinstance(b, ClosedJaxpr) else b for b in values]
    return [b for b in jaxprs if isinstance(b, Jaxpr)]
