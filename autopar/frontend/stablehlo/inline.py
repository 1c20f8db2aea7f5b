"""Calls of a module's functions replaced by what the functions do, so that every call can lie in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

from autopar.errors import TraceError


def inline_calls(module: Any, entry: Any) -> None:
    """Replaces all calls in ``entry``, and calls in what replaces them; functions that nothing calls are removed.

    Args:
        module: the MLIR module.
        entry: the function that is kept.

    Raises:
        TraceError: a function calls itself, or one that the module does not have.
    """
    functions = {_name(f.attributes["sym_name"]): f for f in module.body.operations if f.operation.name == "func.func"}
    _inline(entry, functions, ())
    for f in functions.values():
        if f.operation != entry.operation:
            f.operation.erase()


def _name(attribute: Any) -> str:
    return str(attribute.value)


def _inline(function: Any, functions: dict[str, Any], callers: tuple[str, ...]) -> None:
    for op in list(_every(function.operation)):
        if op.name not in ("func.call", "stablehlo.composite"):
            continue
        name = _name(op.attributes["callee" if op.name == "func.call" else "decomposition"])
        if name in callers or name not in functions:
            raise TraceError(
                f"the module calls {name}, " + ("which calls itself" if name in callers else "which it does not have"),
                remedy="export a module whose functions are all in it and do not recur",
            )
        callee = functions[name]
        _inline(callee, functions, (*callers, name))
        _replace(op, callee)


def _replace(call: Any, callee: Any) -> None:
    block = callee.regions[0].blocks[0]
    values = dict(zip(block.arguments, call.operands, strict=True))
    for op in block.operations:
        if op.operation.name == "func.return":
            for result, returned in zip(call.results, op.operands, strict=True):
                result.replace_all_uses_with(values[returned])
            break
        clone = op.operation.clone(ip=ir.InsertionPoint(call))
        for inner in (clone, *_every(clone)):
            for n, operand in enumerate(list(inner.operands)):
                if operand in values:
                    inner.operands[n] = values[operand]
        values.update(zip(op.results, clone.results, strict=True))
    call.erase()


def _every(operation: Any) -> Iterator[Any]:
    """Operations inside of one, at any depth."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _every(op.operation)
