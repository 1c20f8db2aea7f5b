"""`Split`: a plain train step as two functions, gradients and update.

``step(state, batch)`` is one function of the state. Techniques that read other parameters for the gradient than for
the update need two: G computes what differentiation leaves, U the rest. The cut is found in the traced step: what
`jax.grad` and its kin made carries their name stack (``jvp(..)``, ``transpose(jvp(..))``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.primitives import bind
from autopar._compat.source import is_recomputed, pass_of, source_line
from autopar.errors import TraceError
from autopar.transforms.codes import MaxWindows

_CALLS = ("jit", "pjit")
_LOOPS = ("scan", "while", "cond")

#: A value -> its code and what decodes that; None for a value that stays as it is.
Encode: TypeAlias = Callable[[Any], tuple[Any, Callable[[Any], Any]] | None]


@dataclass(frozen=True, eq=False)
class _Equation:
    """An equation whose operands (numbers of values, or literals) and results are numbered over the whole step.

    ``program`` applies it, with its own name stack and source line, to those operands that it does not state itself.
    """

    eqn: JaxprEqn
    program: ClosedJaxpr
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    differentiated: bool


@dataclass(frozen=True, eq=False)
class Split:
    """A traced step, cut between gradients and update; made by `split`.

    Args:
        lines: its equations in running order.
        constants: values that it closes over, by number.
        outputs: numbers or literals of its results.
        crossing: numbers of what G hands to U: gradients, the loss, what else differentiation made.
        before_numbers: numbers of results of unmarked equations that G needs.
        seeds: number of the first cotangent of each equation that begins a backward pass, by its place in ``lines``.
        backward: numbers of ``crossing`` that such cotangents reach.
        result_tree: structure of the results.
    """

    lines: tuple[_Equation, ...]
    constants: Mapping[int, Any]
    outputs: tuple[Any, ...]
    crossing: tuple[int, ...]
    before_numbers: frozenset[int]
    seeds: Mapping[int, tuple[int, ...]]
    backward: frozenset[int]
    result_tree: Any

    def gradients(self, leaves: Sequence[Any], scale: Any = None) -> tuple[Any, ...]:
        """G: what crosses, computed from the leaves of the arguments.

        Args:
            leaves: of the arguments.
            scale: a number by which the first cotangents of the backward passes are multiplied; None for 1.
        """
        env = {**self.constants, **dict(enumerate(leaves))}
        for n, line in enumerate(self.lines):
            if line.differentiated or self.before_numbers.intersection(line.results):
                if scale is not None and n in self.seeds:
                    _run_scaled(line, env, self.seeds[n], scale)
                else:
                    _run(line, env)
        return tuple(env[n] for n in self.crossing)

    def holding(self, leaves: Sequence[Any], encode: Encode, *, places: bool = False) -> Any:
        """The step's results, with values of the forward pass encoded until the backward pass reads them.

        Args:
            leaves: of the arguments.
            encode: of a value that the forward pass made its code and what decodes that; None leaves it as it is.
            places: whether gradients of maxima of windows read where the largest elements were, not the elements.
        """
        env = {**self.constants, **dict(enumerate(leaves))}
        backward = [line.differentiated and _is_backward(line.eqn) for line in self.lines]
        opened = [b and line.eqn.primitive.name not in _LOOPS for b, line in zip(backward, self.lines, strict=True)]
        windows = _windows(self.lines, backward) if places else {}
        read = {
            n for k, line in enumerate(self.lines) if opened[k] and k not in windows for n in _numbers(line.operands)
        }
        codes: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        decoded: dict[int, Any] = {}
        largest: dict[tuple[int, MaxWindows], tuple[Any, Callable[[Any], Any]]] = {}
        for k, (line, is_backward, may) in enumerate(zip(self.lines, backward, opened, strict=True)):
            if k in windows and windows[k] in largest:
                code, decode = largest[windows[k]]
                with place_of(line.eqn):
                    env[line.results[0]] = windows[k][1].gradient(decode(code), env[line.operands[0]])
                continue
            for n in sorted(_numbers(line.operands) & codes.keys() - decoded.keys()) if may else ():
                code, decode = codes[n]
                with place_of(line.eqn):
                    decoded[n] = decode(code)
            _run(line, {**env, **decoded} if may else env, env)
            if is_backward or not line.differentiated:
                continue
            for n, window in set(windows.values()):
                with place_of(line.eqn):
                    place = window.largest(env[n]) if n in line.results else None
                if place is not None:
                    largest[n, window] = place
            for n in read.intersection(line.results):
                with place_of(line.eqn):
                    code_of = encode(env[n])
                if code_of is not None:
                    codes[n] = code_of
        return jax.tree.unflatten(self.result_tree, [_read(env, o) for o in self.outputs])

    def update(self, leaves: Sequence[Any], crossing: Sequence[Any]) -> Any:
        """U: the step's results, from the leaves of the arguments and from what crosses."""
        env = {**self.constants, **dict(enumerate(leaves)), **dict(zip(self.crossing, crossing, strict=True))}
        needed = _numbers(self.outputs)
        wanted = []
        for line in reversed(self.lines):
            if not line.differentiated and (needed.intersection(line.results) or line.eqn.effects):
                wanted.append(line)
                needed |= _numbers(line.operands)
        for line in reversed(wanted):
            _run(line, env)
        return jax.tree.unflatten(self.result_tree, [_read(env, o) for o in self.outputs])


def split(step: Any, args: Sequence[Any]) -> Split:
    """``step`` cut between gradients and update.

    Args:
        step: ``step(*args)``; its leaves have to be arrays or numbers.
        args: arguments, or their shapes.

    Raises:
        TraceError: nothing in it is differentiated; a gradient depends on another's update (two updates in one step).
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    flat = _Flattening()
    arguments = [flat.number() for _ in closed.jaxpr.invars]
    outputs = flat.closed(closed, arguments)
    lines = flat.lines
    if not any(line.differentiated for line in lines):
        raise TraceError(
            f"{getattr(step, '__name__', step)} differentiates nothing, so its gradient cannot be told from its update",
            cause="gradients are computed by hand, or before the step",
            remedy="give the two apart: delayed(gradients, update)",
        )
    before = _before(lines)
    seeds, reached = _seeds(lines)
    differentiated = {n for line in lines if line.differentiated for n in line.results}
    read = {o for line in lines if not line.differentiated for o in _numbers(line.operands)} | _numbers(outputs)
    return Split(
        tuple(lines), flat.constants, tuple(outputs), tuple(sorted(differentiated & read)), before, seeds,
        frozenset(differentiated & read & reached), jax.tree.structure(shapes),
    )  # fmt: skip


def _before(lines: Sequence[_Equation]) -> frozenset[int]:
    """Results of unmarked equations that marked ones need; see `split` for what is refused."""
    needed: set[int] = set()
    before: set[int] = set()
    backward: set[int] = set()
    updated: set[int] = set()  # depends on a gradient by way of an unmarked equation
    for line in lines:
        operands = _numbers(line.operands)
        if line.differentiated and operands & updated:
            raise TraceError(
                "a gradient depends on the update that another gradient makes",
                cause="the step has two updates, one after the other",
                remedy="make two steps, or give gradients and update apart: delayed(gradients, update)",
                source=source_line(line.eqn.source_info) or None,
            )
        if line.differentiated and _is_backward(line.eqn):
            backward.update(line.results)
        elif operands & (backward | updated) and not line.differentiated:
            updated.update(line.results)
        elif operands & backward:
            backward.update(line.results)
    for line in reversed(lines):
        if line.differentiated or needed.intersection(line.results):
            needed |= _numbers(line.operands)
            if not line.differentiated:
                before.update(line.results)
    return frozenset(before)


def _seeds(lines: Sequence[_Equation]) -> tuple[Mapping[int, tuple[int, ...]], set[int]]:
    """Operands that are the cotangent 1 with which a backward pass begins, by line, and all that depends on them."""
    seeds: dict[int, tuple[int, ...]] = {}
    reached: set[int] = set()
    for n, line in enumerate(lines):
        rematerialized = is_recomputed(line.eqn.source_info)
        if reached.intersection(_numbers(line.operands)):
            reached.update(line.results)
        elif line.differentiated and _is_backward(line.eqn) and not rematerialized:
            ones = tuple(i for i, v in enumerate(line.eqn.invars) if _is_one(v))
            if ones:
                seeds[n] = ones[:1]
                reached.update(line.results)
    return seeds, reached


def _is_one(v: Any) -> bool:
    aval: Any = v.aval
    if not isinstance(v, JaxLiteral) or getattr(aval, "shape", None) != ():
        return False
    return bool(jnp.issubdtype(aval.dtype, jnp.floating)) and float(v.val) == 1.0


def _run_scaled(line: _Equation, env: dict[int, Any], seeds: Sequence[int], scale: Any) -> None:
    """Runs a line with some of its literals multiplied."""
    eqn = line.eqn
    given = dict(zip(line.program.jaxpr.invars, (_read(env, o) for o in line.operands), strict=True))
    values = [v.val if isinstance(v, JaxLiteral) else given[v] for v in eqn.invars]
    for n in seeds:
        aval: Any = eqn.invars[n].aval
        values[n] = jnp.asarray(scale, aval.dtype)
    with place_of(eqn):
        results = bind(eqn.primitive, eqn.params, values)
    env.update(zip(line.results, results, strict=True))


class _Flattening:
    """Numbers the values of a jaxpr, with calls that hold both gradient and update opened."""

    def __init__(self) -> None:
        self.lines: list[_Equation] = []
        self.constants: dict[int, Any] = {}
        self.count = 0

    def number(self) -> int:
        self.count += 1
        return self.count - 1

    def closed(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[variable] = self.number()
            self.constants[env[variable]] = constant
        for eqn in closed.jaxpr.eqns:
            marked = _is_marked(eqn)
            inside = not marked and any(_is_marked(e) for e in _inner(eqn))
            body = eqn.params.get("jaxpr")
            if inside and eqn.primitive.name in _CALLS and isinstance(body, ClosedJaxpr):
                env.update(zip(eqn.outvars, self.closed(body, [_atom(env, v) for v in eqn.invars]), strict=True))
                continue
            results = tuple(self.number() for _ in eqn.outvars)
            variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, JaxLiteral)))
            alone = closed.jaxpr.replace(
                constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
            )
            operands = tuple(env[v] for v in variables)
            self.lines.append(_Equation(eqn, ClosedJaxpr(alone, ()), operands, results, marked or inside))
            env.update(zip(eqn.outvars, results, strict=True))
        return [_atom(env, v) for v in closed.jaxpr.outvars]


def _windows(lines: Sequence[_Equation], backward: Sequence[bool]) -> dict[int, tuple[int, MaxWindows]]:
    """Gradients of maxima of windows, by their place: the number of what windows were taken of, and these."""
    windows: dict[int, tuple[int, MaxWindows]] = {}
    for k, (line, is_backward) in enumerate(zip(lines, backward, strict=True)):
        eqn = line.eqn
        if is_backward and eqn.primitive.name == "select_and_scatter_add" and len(line.operands) == 2:
            p, aval = eqn.params, cast("Any", eqn.invars[1].aval)
            if str(p["select_prim"]) == "ge":
                sizes, strides = tuple(p["window_dimensions"]), tuple(p["window_strides"])
                padding = tuple((int(low), int(high)) for low, high in p["padding"])
                windows[k] = line.operands[1], MaxWindows(tuple(aval.shape), sizes, strides, padding)
    return windows


def _numbers(operands: Sequence[Any]) -> set[int]:
    return {o for o in operands if isinstance(o, int)}


def _run(line: _Equation, env: dict[int, Any], into: dict[int, Any] | None = None) -> None:
    results = jaxpr_as_fun(line.program)(*(_read(env, o) for o in line.operands))
    (env if into is None else into).update(zip(line.results, results, strict=True))


def place_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The name stack and the source line of an equation, for what is applied inside."""
    stack: Any = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context: AbstractContextManager[Any] = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    return context


def _atom(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, JaxLiteral) else env[atom]


def _read(env: Mapping[int, Any], operand: Any) -> Any:
    return operand.val if isinstance(operand, JaxLiteral) else env[operand]


def _is_marked(eqn: JaxprEqn) -> bool:
    return pass_of(eqn.source_info) != ""


def _is_backward(eqn: JaxprEqn) -> bool:
    inner = [eqn, *_inner(eqn)]
    return any(pass_of(e.source_info) == "backward" for e in inner)


def _inner(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Equations in the bodies of ``eqn``, at any depth."""
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if isinstance(jaxpr, Jaxpr):
                for inner in jaxpr.eqns:
                    yield inner
                    yield from _inner(inner)
