"""`Wire`: in which formats weights and gradients are sent, and the marks in a traced step that say so.

`wire_of` reads the user's option, `with_formats` marks the weights and gradients of a traced step, and `wired` marks
one value: devices that send it use the format. On one device marks change nothing.

A weight is marked where an operator of the forward or backward pass reads it, after casts and reshapes: masters, and
updates of them, are not. A gradient is marked where the update reads it, so that terms of microbatches add up first,
and where a loop of the backward pass stacks it. Codes and scales of the formats are in `autopar.transforms.formats`;
the operators that send are chosen by the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.jaxprs import plain_params
from autopar.errors import AutoparError
from autopar.frontend.equations import (
    bind_equation,
    body_of,
    holds_passes,
    interpreted,
    phase_of_equation,
    recomputes,
    shapes_of,
)
from autopar.ir.formats import FORMATS, WireFormat
from autopar.ir.primitives import CASTS, RESHAPES

#: What may be sent in a format of its own.
ROLES = ("gradients", "weights")

#: Formats of what is sent; one bit an element needs error feedback (`autopar.transforms.one_bit_adam`).
WIRE_FORMATS = tuple(name for name in FORMATS if name != "sign")
# What a weight is read through: elements stay what they are.
_VIEWS = CASTS | RESHAPES | {"transpose", "rev", "stop_gradient"}
# What a gradient passes from the loop that stacks it to the update.
_LINEAR = _VIEWS | {"add_any", "neg"}


@dataclass(frozen=True)
class Wire:
    """Formats in which gradients and weights are sent, as ZeRO++'s qgZ and qwZ (Wang et al., 2023).

    Values of two dims and more are sent so; scalars and vectors as they are. Each element that a device receives is off
    by at most half a step of its block a term; sums are taken in float32 after decoding.

    Args:
        gradients: what adds up gradients on their way to the update; None: in their own dtype.
        weights: what gathers parameters for the forward and the backward pass; the update reads masters. None as above.
    """

    gradients: WireFormat | None = None
    weights: WireFormat | None = None


def wire_of(given: Any) -> Wire | None:
    """A `Wire` from what `autopar.parallelize` is given: a mapping from roles to formats or their names.

    Raises:
        AutoparError: a role or a format is unknown.
    """
    if given is None or isinstance(given, Wire):
        return given
    if not isinstance(given, Mapping):
        raise AutoparError(f"wire={given!r} is no mapping", remedy='wire={"gradients": "int8", "weights": "int8"}')
    unknown = [role for role in given if role not in ROLES]
    if unknown:
        raise AutoparError(f"wire has {unknown[0]!r}, which is not a role", remedy=f"roles are {', '.join(ROLES)}")
    return Wire(**{role: _format_of(role, value) for role, value in given.items()})


def _format_of(role: str, value: Any) -> WireFormat | None:
    name = value.name if isinstance(value, WireFormat) else value
    if name is not None and name not in WIRE_FORMATS:
        raise AutoparError(
            f"wire[{role!r}]={value!r} is not a wire format", remedy=f"one of {', '.join(WIRE_FORMATS)}, or None"
        )
    return WireFormat(value.name, value.block) if isinstance(value, WireFormat) else value and WireFormat(value)


def _made() -> Primitive:
    primitive = Primitive("wire")
    primitive.def_abstract_eval(lambda x, *, format: x)
    return primitive


wire_p = _made()


def wired(x: Any, format: WireFormat) -> Any:
    """``x``, whose shards are gathered and whose terms are added up in ``format``."""
    apply: Any = wire_p.bind
    return apply(x, format=format.text)


def with_formats(wire: Wire, closed: ClosedJaxpr, parameters: Sequence[bool]) -> ClosedJaxpr:
    """The step with marks on values that are sent in a format, with the same arguments and results.

    Args:
        wire: formats by role.
        closed: the traced step.
        parameters: of each argument whether it is a parameter.
    """

    def run(*arguments: Any) -> list[Any]:
        values = [_SentValue(a, "weights" if p else "") for a, p in zip(arguments, parameters, strict=True)]
        constants = [_SentValue(c) for c in closed.consts]
        walk = _Walk(wire, _for_update(closed.jaxpr, "update"))
        return [walk.taken(v, "update") for v in walk.jaxpr(closed.jaxpr, constants, values, "")]

    return jax.make_jaxpr(run)(*shapes_of(closed.jaxpr.invars))


@dataclass
class _SentValue:
    """A value, what it is ("weights", "gradients", or ""), and the marked one where some operator has read it."""

    array: Any
    role: str = ""
    marked: Any = None


@dataclass(frozen=True)
class _Walk:
    """Interprets a jaxpr.

    Args:
        wire: formats by role.
        for_update: variables of the jaxpr that the update reads.
        enclosing: phase of what is not marked.
        in_loop: whether it is the body of a loop, whose sums go on.
    """

    wire: Wire
    for_update: Collection[Any]
    enclosing: str = "update"
    in_loop: bool = False

    def jaxpr(
        self, jaxpr: Jaxpr, constants: Sequence[_SentValue], operands: Sequence[_SentValue], scope: str
    ) -> list[_SentValue]:
        """Results of a jaxpr."""
        return interpreted(jaxpr, [*constants, *operands], scope, self._equation, _SentValue)

    def taken(self, value: _SentValue, phase: str) -> Any:
        """The form of a value that an operator of ``phase`` takes."""
        if value.role != ("gradients" if phase == "update" else "weights"):
            return value.array
        if value.marked is None:
            value.marked = _marked(value.array, getattr(self.wire, value.role))
        return value.marked

    def _equation(self, eqn: JaxprEqn, operands: list[_SentValue], scope: str) -> list[_SentValue]:
        name = eqn.primitive.name
        opened = None if name == "shard_map" else body_of(eqn)
        if opened is not None:
            return self._opened(eqn, opened, operands, scope)
        phase = phase_of_equation(eqn, self.enclosing)
        if name == "optimization_barrier":
            return _after_barrier(operands)
        if name == "scan":
            results = self._scan(eqn, operands, phase)
        elif name in _VIEWS and operands[0].role == "weights":
            return [_SentValue(r, "weights") for r in bind_equation(eqn, [operands[0].array], {})]
        else:
            results = bind_equation(eqn, [self.taken(v, phase) for v in operands], {})
        adds_up = phase == "backward" or (phase == "update" and holds_passes(eqn))
        return [_SentValue(r, "gradients" if adds_up and not self.in_loop else "") for r in results]

    def _opened(
        self, eqn: JaxprEqn, opened: tuple[Any, Sequence[int]], operands: list[_SentValue], scope: str
    ) -> list[_SentValue]:
        body, taken = opened
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
        if recomputes(eqn):
            operands = _after_barrier(operands)
        enclosing = phase_of_equation(eqn, self.enclosing)
        results = _pairs(closed.jaxpr.outvars, eqn.outvars, self.for_update)
        inside = _Walk(self.wire, _for_update(closed.jaxpr, enclosing, results), enclosing, self.in_loop)
        return inside.jaxpr(closed.jaxpr, [_SentValue(c) for c in closed.consts], [operands[i] for i in taken], scope)

    def _scan(self, eqn: JaxprEqn, operands: list[_SentValue], phase: str) -> list[Any]:
        """A loop. Weights are marked in front of it and inside, a slice at a time: one of both gathers them.

        Rows of gradients that it stacks are marked inside.
        """
        params = plain_params("scan", eqn.params)
        body: ClosedJaxpr = params["jaxpr"]
        first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, rows = operands[:first], operands[second:]
        stacked = eqn.outvars[params["num_carry"] :]
        passes = "forward" if phase == "update" and holds_passes(eqn) else phase
        fixed, xs = (
            [self.taken(v, passes) if v.role == "weights" else v.array for v in some] for some in (consts, rows)
        )
        walk = _Walk(self.wire, _for_update(body.jaxpr, phase), phase, in_loop=True)

        def run(carry: Any, row: Any) -> tuple[Any, Any]:
            values = [
                *(_SentValue(a, v.role) for a, v in zip(fixed, consts, strict=True)),
                *map(_SentValue, carry),
                *(_SentValue(a, v.role) for a, v in zip(row, rows, strict=True)),
            ]
            results = walk.jaxpr(body.jaxpr, [_SentValue(c) for c in body.consts], values, "")
            after, last = results[: params["num_carry"]], results[params["num_carry"] :]
            ys = [
                _marked(v.array, self.wire.gradients) if phase == "backward" and y in self.for_update else v.array
                for v, y in zip(last, stacked, strict=True)
            ]
            return [v.array for v in after], ys

        last, ys = jax.lax.scan(
            run,
            [v.array for v in operands[first:second]],
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*last, *ys]


def _marked(array: Any, format: WireFormat | None) -> Any:
    """``array`` after a mark, where it has two dims and the format takes fewer bits than it has."""
    if format is None or jnp.ndim(array) < 2 or not jnp.issubdtype(jnp.result_type(array), jnp.floating):
        return array
    return wired(array, format) if format.message_bytes(array.size) < array.size * array.dtype.itemsize else array


def _for_update(jaxpr: Jaxpr, enclosing: str, results: Iterable[Any] = ()) -> frozenset[Any]:
    """Variables that the update reads, by way of linear operators.

    Args:
        jaxpr: a program.
        enclosing: the phase that it is in.
        results: those of its results that the update reads, if it is in another phase.
    """
    given = jaxpr.outvars if enclosing == "update" else results
    read = {v for v in given if not isinstance(v, JaxLiteral)}
    for eqn in reversed(jaxpr.eqns):
        phase = phase_of_equation(eqn, enclosing)
        updates = phase == "update" and not holds_passes(eqn)
        if updates or (eqn.primitive.name in _LINEAR and any(v in read for v in eqn.outvars)):
            read.update(v for v in eqn.invars if not isinstance(v, JaxLiteral))
    return frozenset(read)


def _pairs(inner: Sequence[Any], outer: Sequence[Any], wanted: Collection[Any]) -> list[Any]:
    """Variables inside a call whose counterparts outside are wanted."""
    return [b for b, v in zip(inner, outer, strict=True) if v in wanted and not isinstance(b, JaxLiteral)]


def _after_barrier(operands: Sequence[_SentValue]) -> list[_SentValue]:
    held = [i for i, v in enumerate(operands) if isinstance(v.array, jax.core.Tracer)]
    after = list(operands)
    for i, array in zip(held, jax.lax.optimization_barrier([operands[i].array for i in held]), strict=True):
        after[i] = _SentValue(array, operands[i].role)
    return after
