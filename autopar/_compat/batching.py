"""Batching of a primitive by a `jax.vmap` with a named axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching

#: (name of the vmapped axis, its size, operands, dim of each operand along it or None, parameters) ->
#: (result, dim of the result along the axis or None).
NamedRule = Callable[[str, int, Sequence[Any], Sequence["int | None"], dict[str, Any]], "tuple[Any, int | None]"]


def def_named_batching(primitive: Primitive, rule: NamedRule) -> None:
    """Gives ``primitive``, of one result, its rule, which is asked also where no operand has the axis."""

    def named(axis: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[Any, int | None]:
        return rule(axis.name, axis.size, operands, dims, params)

    rules: Any = batching.fancy_primitive_batchers
    rules[primitive] = named
