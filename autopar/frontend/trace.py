"""`Traced`, from a callable and a call signature: the graph, with the data for running it.

`trace` traces a function once for each signature. Functions decorated with `autopar.parallelize` that are called
inside of it run inline; `note` keeps what they were given for the plan. Building the graph is
`autopar.frontend.build`.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.jaxprs import discharged, is_ref, own_constant, reference_equations, uses_refs, without_high_types
from autopar._compat.source import source_line
from autopar.errors import AutoparError, TraceError
from autopar.errors.base import as_kind
from autopar.frontend.build import BoundGraph, build_graph
from autopar.frontend.manual import with_copies
from autopar.frontend.order import order
from autopar.frontend.roles import assign_roles
from autopar.frontend.signature import NUMBERS, CallSignature
from autopar.ir import Graph

#: Builtin types of errors by which jax says that it cannot trace something.
PLAIN_ERRORS = (TypeError, IndexError, ValueError)
# How jax says in a plain TypeError, IndexError or ValueError that a value is not known while tracing.
_CONCRETE = ("concrete values", "must be static integers", "must have static start", "Non-hashable static arguments")
_UNTRACEABLE = ("not a valid JAX type", *_CONCRETE)
# Python's own errors name the type that a value has while tracing. They may be the user's, and pass as they are. jax
# has no gradient of the number from which a window begins, which is asked for only where a module's number is traced.
_WANTS_VALUES = ("Tracer", "init_value_tangent", *_CONCRETE)
# Causes and remedies of errors of tracing.
_NEEDS_VALUE = (
    "Python code that needs the value of an array (if, while, int(), numpy) while jax traces the function",
    "use jax.lax.cond, jax.lax.while_loop or jnp.where, or name the argument in static_argnums",
)
_ESCAPED = (
    "a value of one trace is kept in a global, a closure or an attribute, and another trace reads it",
    "return the value, and pass it as an argument; attributes take numpy arrays",
)
# Lines of jax's messages that name the trace that `make_jaxpr` began, or lead to jax's documentation.
_OF_JAX_TRACE = ("The error occurred while tracing the function", "See https://")
_NOTES: ContextVar[dict[str, None] | None] = ContextVar("autopar_nested", default=None)


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function.

    Args:
        program: its graph, with the primitives and parameters to run it. The graph's inputs are the traced leaves of
            the call, then the arrays that the function closes over.
        signature: the call that it was traced for.
        closed_over: those arrays.
        out_treedef: structure of the results.
        out_static: value of each result leaf that is no array, by leaf index.
        arguments: for each traced leaf its path, its argument (position or name) and its path inside it.
        weak: whether each array result is weakly typed.
        jaxpr: the function's, as it is written; its inputs are the traced leaves.
        phases: (phase, seconds) that making it took.
        nested: lines on decorated functions that this one calls, whose options have no effect.
        rewrites: lines on products that are computed in another order than the function says.
        as_written: the function without these; None where there are none.
    """

    program: BoundGraph
    signature: CallSignature
    closed_over: tuple[Any, ...]
    out_treedef: Any
    out_static: tuple[tuple[int, Any], ...]
    arguments: tuple[tuple[str, int | str, str], ...] = ()
    weak: tuple[bool, ...] = ()
    jaxpr: ClosedJaxpr | None = None
    phases: tuple[tuple[str, float], ...] = ()
    nested: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    as_written: Traced | None = None

    @property
    def written(self) -> ClosedJaxpr:
        """The function's jaxpr. TraceError where the function was read from a file, which has none."""
        if self.jaxpr is None:
            raise TraceError(f"{self.graph.name} was not traced by jax", remedy="read its graph")
        return self.jaxpr

    @property
    def graph(self) -> Graph:
        """The graph, without jax."""
        return self.program.graph

    def results(self, arrays: Sequence[Any]) -> Any:
        """The function's result with ``arrays`` as its array leaves."""
        out = list(arrays)
        for index, value in self.out_static:
            out.insert(index, value)
        return jax.tree.unflatten(self.out_treedef, out)


def _is_array(leaf: Any, numbers: bool) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OUSMm" and leaf.dtype.type is not np.void
    return isinstance(leaf, jax.Array) or (numbers and isinstance(leaf, NUMBERS))


def _holds_nothing(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


@dataclass(eq=False)
class _FlatCall:
    """The user's function as one from arrays to arrays; what a trace of it sees is noted.

    Args:
        fn: the function.
        signature: of the call.
        static_numbers: whether Python numbers are values of the program.
    """

    fn: Callable[..., Any]
    signature: CallSignature
    static_numbers: bool
    argument_paths: tuple[tuple[str, int | str, str], ...] = ()
    out_paths: tuple[str, ...] = ()
    out_treedef: Any = None
    out_static: tuple[tuple[int, Any], ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        """The arrays of the result."""
        self.argument_paths = self.signature.paths(self.fn, arrays)
        args, kwargs = self.signature.arguments(arrays)
        with_paths, self.out_treedef = jax.tree_util.tree_flatten_with_path(self.fn(*args, **kwargs))
        if any(is_ref(leaf) for _, leaf in with_paths):
            raise TraceError(
                f"{callable_name(self.fn)} returns a mutable reference",
                cause="a reference of jax.new_ref, or one among the arguments, is part of the result",
                remedy="return what it holds, ref[...] or jax.freeze(ref)",
            )
        if any(isinstance(x, jax.core.Tracer) and not isinstance(x, jax.Array) for _, x in with_paths):
            raise TraceError(
                f"{callable_name(self.fn)} returns a token or another value that is no array",
                cause="a token of jax.lax.create_token, which orders effects, is part of the result",
                remedy="return arrays",
            )
        # Gradients of integers hold no data: they are the same in every call.
        with_paths = [(path, np.zeros(x.shape, x.dtype) if _holds_nothing(x) else x) for path, x in with_paths]
        self.out_static = tuple((i, leaf) for i, (_, leaf) in enumerate(with_paths) if not self._is_array(leaf))
        self.out_paths = tuple(jax.tree_util.keystr(path) for path, leaf in with_paths if self._is_array(leaf))
        return [leaf for _, leaf in with_paths if self._is_array(leaf)]

    def _is_array(self, leaf: Any) -> bool:
        return _is_array(leaf, not self.static_numbers)


def _jaxpr(fn: Callable[..., Any], call: _FlatCall, signature: CallSignature) -> ClosedJaxpr:
    """The jaxpr of ``call``; TraceError, of jax's type too, with the user's line where jax cannot trace it."""
    try:
        closed = jax.make_jaxpr(call)(*signature.avals())
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
        raise _trace_error(fn, error) from error
    except PLAIN_ERRORS as error:
        if not any(text in str(error) for text in _UNTRACEABLE):
            raise
        raise _trace_error(fn, error) from error
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        refusal = TraceError(
            f"{callable_name(fn)} uses a value of another trace",
            cause="the value was kept in a global or a closure while jax traced another function",
            remedy="return the value from that function, and pass it as an argument",
        )
        raise as_kind(refusal, jax.errors.UnexpectedTracerError)
    if getattr(closed.jaxpr, "is_high", False):
        closed = without_high_types(closed)
    if getattr(closed.jaxpr, "is_high", False):
        raise _high_level(fn, closed.jaxpr)
    return with_copies(_without_refs(fn, closed) if uses_refs(closed) else closed)


def _high_level(fn: Callable[..., Any], jaxpr: Jaxpr) -> TraceError:
    """The refusal of a program with values that are no arrays before jax has lowered them."""
    uses = [(e, v.aval) for e in jaxpr.eqns for v in (*e.invars, *e.outvars) if getattr(v.aval, "is_high", False)]
    kinds = sorted({type(aval).__name__ for _, aval in uses}) or ["of an operator inside"]
    return TraceError(
        f"{callable_name(fn)} uses values of a high-level type: {', '.join(kinds)}",
        cause="variables of flax nnx with hijax=True, or another type that jax lowers to arrays after tracing",
        remedy="nnx.with_vars(module, hijax=False), or pass the arrays that it holds",
        source=_line([e for e, _ in uses]),
    )


def _without_refs(fn: Callable[..., Any], closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops carry what its mutable references hold; TraceError where jax has no such program."""
    name, eqns = callable_name(fn), list(reference_equations(closed.jaxpr))
    if any(map(is_ref, closed.consts)):
        reads = [e for e in eqns if any(v in closed.jaxpr.constvars for v in e.invars if not isinstance(v, JaxLiteral))]
        raise TraceError(
            f"{name} closes over a mutable reference",
            cause="a reference that was made outside by jax.new_ref, and is read or written inside",
            remedy="pass the reference as an argument",
            source=_line(reads),
        )
    try:
        return discharged(closed)
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        last = str(error).split()[-1] if str(error) else ""
        raise TraceError(
            f"{name} uses mutable references in a way that jax cannot turn into values: {error}",
            cause="a reference is read or written inside of a custom derivative rule, or after jax.freeze",
            remedy="read the reference before, give its value to the function, and write what comes back; or carry the "
            "value through the loop",
            source=_line([e for e in eqns if e.primitive.name == last] or eqns),
        ) from error


def _line(eqns: Sequence[JaxprEqn]) -> str | None:
    return next((line for e in eqns if (line := source_line(e.source_info))), None)


def trace(
    fn: Callable[..., Any],
    signature: CallSignature,
    *,
    batch_argnums: Sequence[int] | None = None,
    static_numbers: bool = False,
    rewrites: Sequence[Callable[[ClosedJaxpr, Sequence[bool]], ClosedJaxpr]] = (),
) -> Traced:
    """Traces ``fn`` for one signature.

    Args:
        fn: the user's function.
        signature: from `flatten_call`.
        batch_argnums: positions of the arguments that are the batch; None finds them.
        static_numbers: whether Python numbers are values of the program, those of the result too.
        rewrites: each makes another program with the same arguments and results; it takes of each argument
            whether it is a parameter.

    Raises:
        TraceError: jax cannot trace the function; the message has the user's line.
    """
    call = _FlatCall(fn, signature, static_numbers)
    with collected() as nested:
        closed = _jaxpr(fn, call, signature)
    paths, closed_over = call.argument_paths, tuple(map(own_constant, closed.consts))
    written = ClosedJaxpr(closed.jaxpr, list(closed_over))

    def built(closed: ClosedJaxpr) -> BoundGraph:
        inputs = [(path, "other") for path, _, _ in paths]
        bound = build_graph(closed, callable_name(fn), inputs, call.out_paths, constant_inputs=True)
        graph = order(assign_roles(bound.graph, [(argument, inner) for _, argument, inner in paths], batch_argnums))
        return replace(bound, graph=graph)

    program = built(closed)
    for rewrite in rewrites:
        closed = rewrite(closed, [i.role == "parameter" for i in program.graph.inputs[: len(paths)]])
        program, closed_over = built(closed), tuple(map(own_constant, closed.consts))
    return Traced(
        program=program,
        signature=signature,
        closed_over=closed_over,
        out_treedef=call.out_treedef,
        out_static=call.out_static,
        arguments=paths,
        jaxpr=written,
        nested=tuple(nested),
        weak=tuple(bool(getattr(a, "weak_type", False)) for a in closed.out_avals),
    )


def callable_name(fn: Any) -> str:
    """A name for ``fn``: its own, that of what a partial wraps, or that of its class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def user_frame(error: BaseException) -> str:
    """The innermost line of the traceback that is neither jax's, nor ours, nor in an installed package."""
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith((ours, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
    return ""


def needs_values(error: BaseException | None) -> bool:
    """Whether ``error`` is jax's way to say that Python code wants the value of a traced number."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return False
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return True
    return isinstance(error, PLAIN_ERRORS) and any(text in str(error) for text in _WANTS_VALUES)


def _trace_error(fn: Callable[..., Any], error: Exception) -> AutoparError:
    cause, remedy = _NEEDS_VALUE if not isinstance(error, jax.errors.UnexpectedTracerError) else _ESCAPED
    refusal = TraceError(
        f"{callable_name(fn)} cannot be traced: {type(error).__name__}: {_in_jax_words(error)}",
        cause=cause,
        remedy=remedy,
        source=user_frame(error) or None,
    )
    return as_kind(refusal, type(error))


def _in_jax_words(error: Exception) -> str:
    """The message of an error of jax, without its lines on jax's own trace and its link."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n  ".join(line for line in lines if line and not line.startswith(_OF_JAX_TRACE))


@contextmanager
def collected() -> Iterator[dict[str, None]]:
    """Collects the texts that `note` is given while the body runs, each once and in order, as keys."""
    notes: dict[str, None] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note(text: str) -> None:
    """Adds a text to those of the function that is being traced; does nothing where none is."""
    notes = _NOTES.get()
    if notes is not None:
        notes[text] = None
