"""Runs the body of a manual region on one device's pieces, inside a `jax.vmap` for each mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral
from jax.extend.source_info_util import current_name_stack, user_context

from autopar._compat.loops import plain_params
from autopar._compat.source import source_line
from autopar.errors import TraceError
from autopar.frontend.bodies import PLACING, body_of, recomputes, without_shardings
from autopar.frontend.manual.collective import collective
from autopar.frontend.manual.kinds import Index
from autopar.frontend.manual.parameters import COLLECTIVES, collective_of
from autopar.frontend.manual.ragged import ragged_all_to_all
from autopar.frontend.while_loop import while_loop

#: (equation, operands) -> results of a region inside this one.
Nested = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]


class Body:
    """Runs jaxprs of one region.

    Args:
        sizes: of the mesh axes by name.
        nested: runs a region inside this one.
    """

    def __init__(self, sizes: Mapping[str, int], nested: Nested) -> None:
        self.sizes = sizes
        self.nested = nested

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr, closed or open (then without constants).

        Raises:
            TraceError: it has an operator that cannot be run for all devices at once.
        """
        open_jaxpr: Jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        env: dict[Any, Any] = dict(zip(open_jaxpr.invars, operands, strict=True))
        env.update(zip(open_jaxpr.constvars, map(_without_mesh, getattr(jaxpr, "consts", ())), strict=True))

        def read(atom: Any) -> Any:
            return _without_mesh(atom.val) if isinstance(atom, JaxLiteral) else env[atom]

        for eqn in open_jaxpr.eqns:
            stack = current_name_stack() + eqn.source_info.name_stack
            with user_context(eqn.source_info.traceback, name_stack=stack):
                env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in open_jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            return self._collective(eqn, operands)
        if name == "ragged_all_to_all":
            return [ragged_all_to_all(eqn.params, operands, self.sizes)]
        if name in PLACING:
            return operands
        if name == "shard_map":
            return self.nested(eqn, operands)
        if name in _LOOPS:
            return _LOOPS[name](self, eqn, operands)
        opened = body_of(eqn)
        if opened is not None:
            body, taken = opened
            if recomputes(eqn):
                operands = list(lax.optimization_barrier(operands))
            return self.run(body, [operands[i] for i in taken])
        if any(type(e).__name__ == "NamedAxisEffect" for e in eqn.effects):
            raise refused(eqn)
        bind: Any = eqn.primitive.bind
        try:
            outputs = bind(*operands, **without_shardings(eqn))
        except NotImplementedError as error:
            raise refused(eqn) from error
        return outputs if eqn.primitive.multiple_results else [outputs]

    def _collective(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        what, dims = collective_of(eqn.primitive.name, eqn.params, self.sizes)
        if isinstance(what, Index):
            return [collective(jnp.int32(0), what)]
        if dims:  # only reductions go over dims of the operands too
            over: Any = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}[eqn.primitive.name]
            operands = [over(x, dims).astype(x.dtype) for x in operands]
        return [collective(x, what) for x in operands]

    def scan(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """A ``scan``."""
        params = plain_params("scan", eqn.params)
        first, carries = params["num_consts"], params["num_carry"]
        consts = operands[:first]

        def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.run(params["jaxpr"], [*consts, *carry, *row])
            return outputs[:carries], outputs[carries:]

        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, rows = lax.scan(body, operands[first : first + carries], operands[first + carries :], **options)
        return [*carry, *rows]

    def loop(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """A ``while``."""
        params = eqn.params
        in_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def goes_on(carry: Sequence[Any]) -> Any:
            return self.run(params["cond_jaxpr"], [*operands[:in_cond], *carry])[0]

        def body(carry: Sequence[Any]) -> list[Any]:
            return self.run(params["body_jaxpr"], [*operands[in_cond:first], *carry])

        return while_loop(goes_on, body, operands[first:], params["cond_jaxpr"].out_avals[0].ndim)

    def branch(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """A ``cond``."""

        def taken(jaxpr: Any) -> Callable[..., list[Any]]:
            return lambda *values: self.run(jaxpr, values)

        index, *rest = operands
        return list(lax.switch(jnp.asarray(index, np.int32), [taken(b) for b in eqn.params["branches"]], *rest))


_LOOPS: Mapping[str, Callable[[Body, JaxprEqn, list[Any]], Sequence[Any]]] = MappingProxyType(
    {"scan": Body.scan, "while": Body.loop, "cond": Body.branch}
)


def _without_mesh(written: Any) -> Any:
    """A number or array that is written into a region, without the mesh of the region, which jax keeps in its type.

    What comes of it outside of the region would be of that mesh, and jax mixes no values of two.
    """
    return written.view() if isinstance(written, np.ndarray) else written


def refused(eqn: JaxprEqn) -> TraceError:
    """The error for an equation that cannot be run for all devices at once."""
    return TraceError(
        f"a shard_map has a {eqn.primitive.name}, which cannot be run for all devices of its mesh at once",
        cause="autopar runs the program of a shard_map or pmap for all devices of its mesh as one batch (jax.vmap), "
        "and this operator cannot be batched",
        remedy="write it with psum, all_gather, ppermute or all_to_all, or call the function on the whole arrays "
        "without shard_map: autopar splits it",
        source=source_line(eqn.source_info) or None,
    )
