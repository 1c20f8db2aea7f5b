"""`collective`: applies a `ManualCollective` inside a `jax.vmap` for each of its axes.

Under a ``vmap`` with an axis's name an operand of the primitive gets a leading dim for that axis. When it has one for
each axis of the collective, the pieces of all devices are there, and what is left are ordinary operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from autopar._compat.primitives import def_named_batching
from autopar.frontend.manual.kinds import Broadcast, ManualCollective


def collective(x: Any, what: ManualCollective) -> Any:
    """The result of ``what`` on this device's piece ``x``.

    Args:
        x: an array, inside a `jax.vmap` with ``axis_name`` for each axis.
        what: the collective.
    """
    apply: Any = collective_p.bind
    return apply(x, what=what, leading=()) if what.axes else x


def _evaluated(x: Any, what: ManualCollective, leading: Sequence[str]) -> Any:
    """The result where ``x`` has a leading dim for each name in ``leading``: axes of ``what``, all of them, and others.

    The result has those dims in the same order, without the axes if it does not vary.
    """
    others = [n for n in leading if n not in what.axes]
    first = [*what.axes, *others]
    x = jnp.moveaxis(x, [leading.index(n) for n in first], range(len(first)))
    count = len(what.axes)
    function = what.apply
    for _ in others:
        function = jax.vmap(function, count, count if what.varies else 0)
    output = function(x)
    kept = [n for n in leading if what.varies or n not in what.axes]
    have = [n for n in first if n in kept]
    return jnp.moveaxis(output, [have.index(n) for n in kept], range(len(kept)))


def _type(x: Any, *, what: ManualCollective, leading: tuple[str, ...]) -> Any:
    missing = [(a, n) for a, n in zip(what.axes, what.sizes, strict=True) if a not in leading]
    full = jax.ShapeDtypeStruct((*(n for _, n in missing), *x.shape), x.dtype)
    output = jax.eval_shape(lambda v: _evaluated(v, what, (*(a for a, _ in missing), *leading)), full)
    shape = output.shape[len(missing) if what.varies else 0 :]
    return jax.core.ShapedArray(shape, output.dtype)


def _batched(
    axis: str, size: int, operands: Sequence[Any], dims: Sequence[int | None], params: dict[str, Any]
) -> tuple[Any, int | None]:
    (x,), (dim,), what, leading = operands, dims, params["what"], params["leading"]
    ours = axis in what.axes
    if dim is None and not ours:
        return collective_p.bind(x, what=what, leading=leading), None
    if dim is None and isinstance(what, Broadcast) and what.axes == (axis,):
        return x, None  # all have the same already
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    # A vmap inside the region may have no name, or one that several have.
    name = axis if ours else f"#{len(leading)}"
    leading = (name, *leading)
    if set(what.axes) <= set(leading):
        output = _evaluated(x, what, leading)
    else:
        output = collective_p.bind(x, what=what, leading=leading)
    return output, None if ours and not what.varies else 0


def _made() -> Primitive:
    primitive = Primitive("mesh_collective")
    primitive.def_abstract_eval(_type)
    def_named_batching(primitive, _batched)
    return primitive


collective_p = _made()
