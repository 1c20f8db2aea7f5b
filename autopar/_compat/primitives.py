"""Primitives that autopar binds by itself, found without private names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import batching

#: (name of the vmapped axis, its size, operands, dim of each operand along it or None, parameters) ->
#: (result, dim of the result along the axis or None).
NamedRule = Callable[[str, int, Sequence[Any], Sequence["int | None"], dict[str, Any]], "tuple[Any, int | None]"]


def _primitive_of(function: Callable[[Any], Any]) -> Primitive:
    """The one primitive that ``function`` applies to a float scalar."""
    (eqn,) = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr.eqns
    primitive: Primitive = eqn.primitive
    return primitive


optimization_barrier_p: Primitive = _primitive_of(jax.lax.optimization_barrier)
convert_element_type_p: Primitive = _primitive_of(lambda x: jax.lax.convert_element_type(x, jnp.int32))


def bind(primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Applies a primitive.

    Args:
        primitive: the primitive.
        params: its parameters, as an equation has them.
        operands: concrete or traced.

    Returns a list of results even where there is one.
    """
    apply: Any = primitive.bind
    adapt: Any = primitive.get_bind_params
    results = apply(*operands, **adapt(dict(params)))
    return list(results) if primitive.multiple_results else [results]


def switched(
    index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any], platforms: Sequence[Any] | None
) -> Any:
    """Results of one of several branches.

    Args:
        index: number of the branch; not read where the platform chooses.
        branches: operands -> results.
        operands: of each branch.
        platforms: by branch the names of its platforms, None for that of all others, as ``lax.platform_dependent``
            leaves them in its equation; None where the index chooses. Other branches are not lowered.
    """
    if platforms is None:
        return jax.lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)
    others = next((b for names, b in zip(platforms, branches, strict=True) if names is None), None)
    named = {name: b for names, b in zip(platforms, branches, strict=True) for name in names or ()}
    return jax.lax.platform_dependent(*operands, default=others, **named)


def typed(array: Any, weak: bool) -> Any:
    """The array, weakly typed or not: weakly typed ones, as results of Python numbers alone, yield to other dtypes.

    Args:
        array: concrete or traced.
        weak: whether the result is weakly typed.
    """
    if bool(getattr(array, "weak_type", False)) == weak:
        return array
    apply: Any = convert_element_type_p.bind
    return apply(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def sharding_constraint(shape: tuple[int, ...], sharding: Any) -> JaxprEqn:
    """The equation of ``jax.lax.with_sharding_constraint`` on an array of ``shape``."""
    given = jax.ShapeDtypeStruct(shape, jnp.float32)
    eqns: list[JaxprEqn] = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(given).jaxpr.eqns
    return eqns[0]


def def_named_batching(primitive: Primitive, rule: NamedRule) -> None:
    """Gives ``primitive``, of one result, its rule, which is asked also where no operand has the axis."""

    def named(axis: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[Any, int | None]:
        return rule(axis.name, axis.size, operands, dims, params)

    rules: Any = batching.fancy_primitive_batchers
    rules[primitive] = named
