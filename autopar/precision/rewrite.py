"""`mixed`: a traced float32 step in mixed precision.

The jaxpr is interpreted on pairs of a float32 value and its narrow copy (`Twin`), and traced again. The forward and the
backward pass compute narrow; the update does not. Their equations are told apart by the name stack that differentiation
leaves. The planner sees narrow dtypes like any others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.jaxprs import plain_params
from autopar._compat.source import is_recomputed
from autopar.frontend.equations import (
    bind_equation,
    body_of,
    holds_passes,
    interpreted,
    phase_of_equation,
    recomputes,
    shapes_of,
)
from autopar.precision.eight_bits import BLOCK, COTANGENTS, VALUES, CurrentScales, Scales, coded, rounded_in_blocks
from autopar.precision.policy import FOLLOWING, PRODUCTS, Precision

_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f8": jnp.bfloat16, "mxf8": jnp.bfloat16}
# Reads of a table of parameters take the narrow copy: what they make is an activation.
_READS = frozenset({"gather", "dynamic_slice"})


def mixed(precision: Precision, closed: ClosedJaxpr, parameters: Sequence[bool]) -> ClosedJaxpr:
    """The step in mixed precision, with the same arguments and results.

    Args:
        precision: which operators compute narrow.
        closed: the traced step.
        parameters: of each argument whether it is a parameter, of which narrow copies are taken.
    """

    def run(*arguments: Any) -> list[Any]:
        return results_of(precision, closed, parameters, arguments, CurrentScales())

    return jax.make_jaxpr(run)(*shapes_of(closed.jaxpr.invars))


def results_of(
    precision: Precision, closed: ClosedJaxpr, parameters: Sequence[bool], arguments: Sequence[Any], scales: Scales
) -> list[Any]:
    """The results of the step in mixed precision.

    Other arguments are those of `mixed`.

    Args:
        arguments: of the step.
        scales: what operands in 8 bits are multiplied by.
    """
    twins = [Twin(a, parameter=p) for a, p in zip(arguments, parameters, strict=True)]
    constants = [Twin(c) for c in closed.consts]
    walk = PrecisionWalk(precision, Wanted.of(closed.jaxpr, "update"), scales)
    return [t.as_wide() for t in walk.jaxpr(closed.jaxpr, constants, twins, "")]


@dataclass(frozen=True)
class Wanted:
    """Variables of a program that have to be computed in float32.

    Args:
        wide: those that the update or a result reads, by way of operators that follow: computed in float32.
        exact: those and what else is read in float32: products give it without rounding in between.
    """

    wide: frozenset[Any]
    exact: frozenset[Any]

    @staticmethod
    def of(jaxpr: Jaxpr, enclosing: str, results: Iterable[Any] = ()) -> Wanted:
        """Reads a program.

        Args:
            jaxpr: the program.
            enclosing: the phase that it is in: in the forward or backward pass its results are not wanted as such.
            results: those of its results that are.
        """
        read = jaxpr.outvars if enclosing == "update" else results
        wide = {v for v in read if not isinstance(v, JaxLiteral)}
        exact: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            name, phase = eqn.primitive.name, phase_of_equation(eqn, enclosing)
            opened = None if name == "shard_map" else body_of(eqn)
            if opened is not None:
                inner, outer = Wanted._inside(eqn, opened, phase, wide)
                exact.update(outer[b] for b in inner.exact if b in outer)
                wide.update(outer[b] for b in inner.wide if b in outer)
                continue
            updates = phase == "update" and not holds_passes(eqn)
            if updates or (name in FOLLOWING and any(v in wide for v in eqn.outvars)):
                wide.update(v for v in eqn.invars if not isinstance(v, JaxLiteral))
            if name not in FOLLOWING and name not in PRODUCTS:
                exact.update(v for v in eqn.invars if not isinstance(v, JaxLiteral))
        return Wanted(frozenset(wide), frozenset(exact | wide))

    @staticmethod
    def _inside(
        eqn: JaxprEqn, opened: tuple[Any, Sequence[int]], phase: str, wide: Collection[Any]
    ) -> tuple[Wanted, Mapping[Any, Any]]:
        """Wanted results inside a call, and the outer variables by the variables of its body."""
        body, taken = opened
        jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        results = [b for b, v in zip(jaxpr.outvars, eqn.outvars, strict=True) if v in wide]
        given = zip(jaxpr.invars, (eqn.invars[i] for i in taken), strict=True)
        return Wanted.of(jaxpr, phase, results), {b: v for b, v in given if not isinstance(v, JaxLiteral)}


class PrecisionWalk:
    """Interprets a jaxpr on pairs of a float32 value and its narrow copy.

    Args:
        precision: which operators compute narrow.
        wanted: variables of the jaxpr that are computed in float32 in any case.
        scales: what operands in 8 bits are multiplied by.
        enclosing: phase of what is not marked.
        recomputed: whether it is inside of what a remat computes again.
    """

    def __init__(
        self,
        precision: Precision,
        wanted: Wanted,
        scales: Scales,
        enclosing: str = "update",
        *,
        recomputed: bool = False,
    ) -> None:
        self.precision, self.scales = precision, scales
        self.dtype = _DTYPES[precision.compute]
        self.wide, self.exact = wanted.wide, wanted.exact
        self.enclosing, self.recomputed = enclosing, recomputed

    def jaxpr(self, jaxpr: Jaxpr, constants: Sequence[Twin], operands: Sequence[Twin], scope: str) -> list[Twin]:
        """Results of a jaxpr."""
        return interpreted(jaxpr, [*constants, *operands], scope, self.equation, Twin)

    def _is_recomputed(self, eqn: JaxprEqn) -> bool:
        return self.recomputed or is_recomputed(eqn.source_info)

    def equation(self, eqn: JaxprEqn, operands: list[Twin], scope: str) -> list[Twin]:
        """Results of one equation."""
        results = self._equation(eqn, operands, scope)
        if phase_of_equation(eqn, self.enclosing) == "backward" and not self._is_recomputed(eqn):
            for result in results:
                result.cotangent = True
        return results

    def _equation(self, eqn: JaxprEqn, operands: list[Twin], scope: str) -> list[Twin]:
        name = eqn.primitive.name
        opened = None if name == "shard_map" else body_of(eqn)
        if opened is not None:
            return self._opened(eqn, opened, operands, scope)
        phase = phase_of_equation(eqn, self.enclosing)
        if phase == "update" and not holds_passes(eqn):
            return self._plain(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands, phase)
        if name == "optimization_barrier":
            return self._after_barrier(operands)
        if self.precision.denies(name, scope) or not any(is_wide(v.aval) for v in eqn.invars):
            return self._plain(eqn, operands)
        if name in PRODUCTS and not _is_exact(eqn):
            return self._product(eqn, operands)
        if name in FOLLOWING and not any(v in self.wide for v in eqn.outvars):
            return self._following(eqn, operands)
        return self._plain(eqn, operands)

    def _opened(self, eqn: JaxprEqn, opened: tuple[Any, Sequence[int]], operands: list[Twin], scope: str) -> list[Twin]:
        body, taken = opened
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
        if recomputes(eqn):
            operands = self._after_barrier(operands)
        marked = phase_of_equation(eqn, self.enclosing)
        results = self._results_wanted(closed.jaxpr.outvars, eqn.outvars)
        of_body = Wanted.of(closed.jaxpr, marked, results)
        inside = PrecisionWalk(self.precision, of_body, self.scales, marked, recomputed=self._is_recomputed(eqn))
        return inside.jaxpr(closed.jaxpr, [Twin(c) for c in closed.consts], [operands[i] for i in taken], scope)

    def _plain(self, eqn: JaxprEqn, operands: list[Twin]) -> list[Twin]:
        """The value as the program makes it."""
        return [Twin(r) for r in bind_equation(eqn, [t.as_wide() for t in operands], {})]

    def _product(self, eqn: JaxprEqn, operands: list[Twin]) -> list[Twin]:
        exact = any(v in self.exact for v in eqn.outvars)
        sum_dtype = jnp.dtype(jnp.float32 if exact else self.dtype)
        eight_bits = eqn.primitive.name == "dot_general" and all(is_wide(v.aval) for v in eqn.invars)
        if eight_bits and self.precision.compute == "f8":
            results = [self._scaled_product(eqn, operands).astype(sum_dtype)]
        else:
            if eight_bits and self.precision.compute == "mxf8":
                values = [self._in_blocks(eqn, t, n) for n, t in enumerate(operands)]
            else:
                pairs = zip(eqn.invars, operands, strict=True)
                values = [t.as_narrow(self.dtype) if is_wide(v.aval) else t.as_wide() for v, t in pairs]
            results = bind_equation(eqn, values, {"preferred_element_type": sum_dtype})
        return [Twin(r, follows=True) if exact else Twin(narrow=r, follows=True) for r in results]

    def _scaled_product(self, eqn: JaxprEqn, operands: list[Twin]) -> Any:
        """A product of operands in 8 bits, each with one scale, in float32."""
        codes, scales = [], []
        for twin in operands:
            format = COTANGENTS if twin.cotangent else VALUES
            if format not in twin.codes:
                scale = self.scales.of(twin.at_hand(), format)
                twin.codes[format] = coded(twin.at_hand(), scale, format), scale
            code, scale = twin.codes[format]
            codes.append(code)
            scales.append(scale)
        (total,) = bind_equation(eqn, codes, {"preferred_element_type": jnp.dtype(jnp.float32)})
        return total / (scales[0] * scales[1])

    def _in_blocks(self, eqn: JaxprEqn, twin: Twin, number: int) -> Any:
        """An operand as blocks along the dim that is summed over hold it; bf16 where they do not divide that."""
        dims = eqn.params["dimension_numbers"][0][number]
        aval: Any = eqn.invars[number].aval
        shape = aval.shape
        if len(dims) != 1 or shape[dims[0]] % BLOCK:
            return twin.as_narrow(self.dtype)
        if dims[0] not in twin.codes:
            twin.codes[dims[0]] = rounded_in_blocks(twin.at_hand(), dims[0])
        return twin.codes[dims[0]]

    def _following(self, eqn: JaxprEqn, operands: list[Twin]) -> list[Twin]:
        floats = [
            t for v, t in zip(eqn.invars, operands, strict=True) if is_wide(v.aval) and not isinstance(v, JaxLiteral)
        ]
        leads = any(t.follows for t in floats) or (eqn.primitive.name in _READS and any(t.parameter for t in floats))
        if not leads:
            if floats and all(t.parameter for t in floats):
                return [Twin(r, parameter=True) for r in bind_equation(eqn, [t.as_wide() for t in operands], {})]
            return self._plain(eqn, operands)
        if not all(t.follows or t.parameter for t in floats):
            return self._plain(eqn, operands)  # one is float32 for a reason: so is the result
        values = [
            t.as_narrow(self.dtype) if is_wide(v.aval) else t.as_wide()
            for v, t in zip(eqn.invars, operands, strict=True)
        ]
        return [
            Twin(narrow=r, follows=True) if is_wide(v.aval) else Twin(r)
            for v, r in zip(eqn.outvars, bind_equation(eqn, values, {}), strict=True)
        ]

    def _scan(self, eqn: JaxprEqn, operands: list[Twin], phase: str) -> list[Twin]:
        """A loop whose carry and rows are narrow where its body has them so."""
        params = plain_params("scan", eqn.params)
        body: ClosedJaxpr = params["jaxpr"]
        first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, init, rows = operands[:first], operands[first:second], operands[second:]
        stacked = eqn.outvars[params["num_carry"] :]
        results = self._results_wanted(body.jaxpr.outvars[params["num_carry"] :], stacked)
        walk = PrecisionWalk(self.precision, Wanted.of(body.jaxpr, phase, results), self.scales, phase)
        # Constants and rows that are narrow already enter so; parameters are narrowed inside, a row at a time.
        fixed = [t.stored(t.follows, self.dtype) for t in consts]
        xs = [t.stored(t.follows, self.dtype) for t in rows]
        narrow = [t.follows for t in init]
        carried: list[list[bool]] = []

        def run(carry: Any, row: Any) -> tuple[Any, Any]:
            given = [*(t.follows for t in consts), *narrow, *(t.follows for t in rows)]
            twins = [
                Twin(narrow=value, follows=True) if g else Twin(value, parameter=t.parameter)
                for value, g, t in zip([*fixed, *carry, *row], given, operands, strict=True)
            ]
            for twin, t in zip(twins, operands, strict=True):
                twin.cotangent = t.cotangent
            walk.scales = self.scales.inside()
            body_jaxpr = walk.jaxpr(body.jaxpr, [Twin(c) for c in body.consts], twins, "")
            after, last = body_jaxpr[: len(narrow)], body_jaxpr[len(narrow) :]
            carried.append([t.follows for t in after])
            ys = [_row(t, v in self.wide, self.dtype) for t, v in zip(last, stacked, strict=True)]
            return [t.stored(g, self.dtype) for t, g in zip(after, narrow, strict=True)], (ys, walk.scales.seen())

        while True:  # a carry is narrow where it begins and ends so
            start = [t.stored(g, self.dtype) for t, g in zip(init, narrow, strict=True)]
            jax.eval_shape(run, start, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs])
            stays = [g and after for g, after in zip(narrow, carried[-1], strict=True)]
            if stays == narrow:
                break
            narrow = stays
        last, (ys, seen) = jax.lax.scan(
            run, start, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        self.scales.take(seen)
        return [_twin(v, value) for v, value in zip(eqn.outvars, [*last, *ys], strict=True)]

    def _results_wanted(self, inner: Sequence[Any], outer: Sequence[Any]) -> list[Any]:
        """Results of a body that are wanted in float32 outside."""
        pairs = zip(inner, outer, strict=True)
        return [b for b, v in pairs if v in self.wide and not isinstance(b, JaxLiteral)]

    def _after_barrier(self, operands: Sequence[Twin]) -> list[Twin]:
        """Twins of what a recomputation takes, kept apart from the first computation; held narrow where they follow."""
        held = [i for i, t in enumerate(operands) if not is_constant(t.wide)]
        passed = jax.lax.optimization_barrier([operands[i].stored(operands[i].follows, self.dtype) for i in held])
        after = list(operands)
        for i, value in zip(held, passed, strict=True):
            twin = operands[i]
            after[i] = Twin(narrow=value, follows=True) if twin.follows else Twin(value, parameter=twin.parameter)
            after[i].cotangent = twin.cotangent
        return after


def _row(twin: Twin, wide: bool, dtype: Any) -> Any:
    """A row that a loop stacks: narrow where its reader takes it so."""
    return twin.as_narrow(dtype) if twin.follows and not wide else twin.as_wide()


def _twin(variable: Any, value: Any) -> Twin:
    narrow = is_wide(variable.aval) and value.dtype != jnp.float32
    return Twin(narrow=value, follows=True) if narrow else Twin(value)


def _is_exact(eqn: JaxprEqn) -> bool:
    """Whether the user asked for a precision of a product (`jax.lax.Precision`)."""
    asked = eqn.params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    return any(p not in (None, jax.lax.Precision.DEFAULT) for p in each)


@dataclass
class Twin:
    """A float32 value of the user's program with its narrow copies, each made when it is first read.

    Args:
        wide: as the program states it; None where only the narrow one was computed.
        narrow: None where nobody asked for it.
        follows: whether elementwise operators go on with the narrow one.
        parameter: whether it is a parameter, which goes narrow where another operand does.
        cotangent: whether the backward pass made it, and no recomputation.
        codes: what products took of it in 8 bits, by what they asked for.
    """

    wide: Any = None
    narrow: Any = None
    follows: bool = False
    parameter: bool = False
    cotangent: bool = False
    codes: dict[Any, Any] = field(default_factory=dict)

    def stored(self, narrow: bool, dtype: Any) -> Any:
        """The copy in ``dtype`` if ``narrow``, else the value in the dtype of the user's program."""
        return self.as_narrow(dtype) if narrow else self.as_wide()

    def as_wide(self) -> Any:
        """The value in the dtype of the user's program, converted on first use."""
        if self.wide is None:
            self.wide = jax.lax.convert_element_type(self.narrow, jnp.float32)
        return self.wide

    def at_hand(self) -> Any:
        """The narrow copy where there is one, else the value in the dtype of the user's program."""
        return self.wide if self.narrow is None else self.narrow

    def as_narrow(self, dtype: Any) -> Any:
        """The value in the narrow ``dtype``, converted on first use."""
        if self.narrow is None and is_constant(self.wide):
            self.narrow = np.asarray(self.wide).astype(dtype)
        elif self.narrow is None:
            self.narrow = jax.lax.convert_element_type(self.wide, dtype)
        return self.narrow


def is_wide(aval: Any) -> bool:
    """Whether a value is float32, which is all that precision changes."""
    return bool(getattr(aval, "dtype", None) == jnp.float32)


def is_constant(value: Any) -> bool:
    """Whether a value is written into the program."""
    return isinstance(value, np.ndarray | np.generic | float | int)
