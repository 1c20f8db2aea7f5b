"""From a callable and a call signature to `Traced`: the graph, with what running it needs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import TraceError
from autopar.frontend.build import BoundGraph, build_graph
from autopar.frontend.roles import assign_roles
from autopar.frontend.signature import CallSignature
from autopar.ir import Graph


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function.

    Args:
        program: its graph with what running it needs. The graph's inputs are the traced leaves of the
            call, then the arrays that the function closes over.
        signature: the call that it was traced for.
        closed_over: those arrays.
        out_treedef: structure of the results.
        out_static: value of each result leaf that is no array, by leaf index.
        out_weak: whether each array result is weakly typed.
    """

    program: BoundGraph
    signature: CallSignature
    closed_over: tuple[Any, ...]
    out_treedef: Any
    out_static: tuple[tuple[int, Any], ...]

    @property
    def graph(self) -> Graph:
        """The graph, without jax."""
        return self.program.graph

    def results(self, arrays: Sequence[Any]) -> Any:
        """The function's result from its array leaves."""
        static = dict(self.out_static)
        given = iter(arrays)
        total = len(arrays) + len(static)
        return jax.tree.unflatten(self.out_treedef, [static[i] if i in static else next(given) for i in range(total)])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def trace(
    fn: Callable[..., Any], signature: CallSignature, *, batch_argnums: Sequence[int] | None = None
) -> Traced:
    """Traces ``fn`` for one signature.

    Args:
        fn: the user's function.
        signature: from `flatten_call`.
        batch_argnums: positions of the arguments that are the batch; None finds them.

    Raises:
        TraceError: jax cannot trace the function; the message has the user's line.
    """
    treedefs: list[Any] = []
    statics: list[tuple[tuple[int, Any], ...]] = []
    out_paths: list[tuple[str, ...]] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = signature.arguments(arrays)
        result = fn(*args, **kwargs)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(result)
        kept = [(i, leaf) for i, (_, leaf) in enumerate(with_paths) if not _is_array(leaf)]
        treedefs.append(treedef)
        statics.append(tuple(kept))
        out_paths.append(tuple(jax.tree_util.keystr(path) for path, leaf in with_paths if _is_array(leaf)))
        return [leaf for _, leaf in with_paths if _is_array(leaf)]

    try:
        closed = jax.make_jaxpr(flat)(*signature.avals())
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
        raise _trace_error(fn, error) from error
    except TypeError as error:
        if "not a valid JAX type" not in str(error) and "not callable" not in str(error):
            raise
        raise _trace_error(fn, error) from error
    paths = signature.paths(fn)
    closed_over = tuple(closed.consts)
    program = build_graph(
        closed,
        getattr(fn, "__name__", type(fn).__name__),
        [(path, "other") for path, _, _ in paths],
        out_paths[-1],
    )
    graph = assign_roles(program.graph, [(argument, inner) for _, argument, inner in paths], batch_argnums)
    return Traced(
        program=BoundGraph(graph, program.bounds, program.constants),
        signature=signature,
        closed_over=closed_over,
        out_treedef=treedefs[-1],
        out_static=statics[-1],
    )


def user_frame(error: BaseException) -> str:
    """The innermost line of the traceback that is neither jax's, nor ours, nor in an installed package."""
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith((ours, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
    return ""


def _trace_error(fn: Callable[..., Any], error: Exception) -> TraceError:
    name = getattr(fn, "__name__", type(fn).__name__)
    first = str(error).strip().split("\n")[0]
    return TraceError(
        f"{name} cannot be traced: {type(error).__name__}: {first}",
        cause="Python code that needs the value of an array (if, while, int(), numpy) while jax traces the function",
        remedy="use jax.lax.cond, jax.lax.while_loop or jnp.where, or name the argument in static_argnums",
        source=user_frame(error) or None,
    )
