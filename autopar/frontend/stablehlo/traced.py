"""`traced_module`: a StableHLO module as a traced function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.errors import TraceError
from autopar.frontend.build import build_graph
from autopar.frontend.order import order
from autopar.frontend.roles import assign_roles
from autopar.frontend.signature import SignatureOptions, flatten_call
from autopar.frontend.stablehlo.interpret import ModuleInterpreter
from autopar.frontend.stablehlo.module import StablehloModule
from autopar.frontend.stablehlo.reader import dtype_of
from autopar.frontend.trace import Traced

_ROOT = re.compile(r"\w+")
_WIDE = ("i64", "ui64", "f64", "complex<f64>")


def traced_module(module: StablehloModule, batch: Sequence[int] | None = None) -> Traced:
    """The module's entry function, traced; operators have the numbers of operations as their origins.

    Args:
        module: the module.
        batch: positions of the arguments that are the batch; None finds them.

    Raises:
        TraceError: it has an operation that cannot be planned, or fewer arguments than ``batch`` says.
    """
    wrong = [n for n in batch or () if not 0 <= n < len(module.arguments)]
    if wrong:
        raise TraceError(
            f"{module.name} has {len(module.arguments)} arguments, so none with number {wrong[0]}",
            remedy="count from 0: " + ", ".join(f"{n} {a.name}" for n, a in enumerate(module.arguments[:8])),
        )
    wide = any(a.dtype in _WIDE for a in (*module.arguments, *module.results))
    with jax.enable_x64(wide or bool(jax.config.jax_enable_x64)):  # type: ignore[attr-defined]
        return _traced(module, batch)


def _traced(module: StablehloModule, batch: Sequence[int] | None) -> Traced:
    shapes = [jax.ShapeDtypeStruct(a.shape, dtype_of(a.dtype, a.name)) for a in module.arguments]
    interpreter = ModuleInterpreter(module)
    closed = jax.make_jaxpr(interpreter.run)(*shapes)
    paths = [a.name for a in module.arguments]
    result = build_graph(
        closed,
        module.name,
        [(p, "other") for p in paths],
        [r.name for r in module.results],
        interpreter.labels,
        constant_inputs=True,
    )
    arguments = [_argument(n, p, batch) for n, p in enumerate(paths)]
    graph = order(assign_roles(result.graph, arguments, batch))
    signature, _ = flatten_call(interpreter.run, shapes, {}, SignatureOptions(names=()))
    return Traced(
        replace(result, graph=graph),
        signature,
        tuple(closed.consts),
        jax.tree.structure([0] * len(module.results)),
        (),
        tuple((path, argument, inner) for path, (argument, inner) in zip(paths, arguments, strict=True)),
        weak=(False,) * len(module.results),
    )


def _argument(number: int, path: str, batch: Sequence[int] | None) -> tuple[Any, str]:
    """(argument, path inside it) of a leaf: those whose paths have one beginning are one argument."""
    root = _ROOT.match(path)
    if number in (batch or ()) or root is None:
        return number, ""
    return root[0], path[root.end() :]
