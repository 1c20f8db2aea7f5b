"""A StableHLO module as it was read: its entry function with all calls inlined, arguments and results by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from autopar.errors import TraceError

#: First bytes of MLIR's bytecode; portable artifacts of StableHLO are bytecode as well.
_BYTECODE = b"ML\xefR"
#: What other partitioners left; the plan takes its place.
_OLD = ("sdy.sharding", "mhlo.sharding")
_NAMED = re.compile(r'loc\("([^"]*)"')


@dataclass(frozen=True)
class Argument:
    """An argument or a result of a module.

    Args:
        name: as the frontend calls it (``state.params['w']``), else ``arg3`` or ``[1]``.
        shape: its shape.
        dtype: its element type, as MLIR prints it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class StablehloModule:
    """A module in memory.

    Args:
        name: its name.
        module: the MLIR module; calls of its entry function are inlined.
        entry: that function.
        arguments: of that function.
        results: of that function.
        notes: what was in it and is not kept.
    """

    name: str
    module: Any
    entry: Any
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    notes: tuple[str, ...] = ()

    @property
    def block(self) -> Any:
        """Operations of the entry function."""
        return self.entry.regions[0].blocks[0]

    def operations(self) -> Iterator[Any]:
        """Operations of the entry function and of loops and branches in it; their positions are their numbers."""
        yield from walk(self.block)


def walk(block: Any) -> Iterator[Any]:
    """Operations of a block, each followed by those of its control flow."""
    for op in block.operations:
        yield op
        if op.operation.name in CONTROL:
            for region in op.regions:
                for inner in region.blocks:
                    yield from walk(inner)


#: Operations whose regions run as parts of the program, rather than saying how elements are combined.
CONTROL = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})


def read_module(source: str | bytes | Path) -> StablehloModule:
    """Reads a module.

    Args:
        source: path of a file, or what is in it: MLIR's text, its bytecode, or a portable artifact.

    Raises:
        TraceError: it cannot be parsed, or has no entry function, or shapes that are not known.
    """
    data, place = _content(source)
    context: Any = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    try:
        with context:
            module = _parse(context, data)
    except (ir.MLIRError, ValueError) as error:
        first = [line.strip() for line in str(error).splitlines() if "error:" in line] or [str(error).strip()]
        raise TraceError(
            f"{place} cannot be read: {first[0].removeprefix('error: ')}",
            cause="text of another version of StableHLO, or no StableHLO at all",
            remedy="write a portable artifact (jax.export's mlir_module_serialized), which keeps across versions",
        ) from error
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    entries = [f for f in functions if _text(f.attributes["sym_name"]) == "main"] or functions[:1]
    if not entries:
        raise TraceError(f"{place} has no function", remedy="a module with a function @main")
    with context, ir.Location.unknown():
        inline_calls(module, entries[0])
        return _module(module, entries[0], place)


def _content(source: str | bytes | Path) -> tuple[str | bytes, str]:
    if isinstance(source, bytes):
        return source, "the module"
    if isinstance(source, str) and "\n" in source:
        return source, "the module"
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise TraceError(f"{source} cannot be read: {error.strerror}", remedy="name a file with a module") from error
    if data.startswith(_BYTECODE):
        return data, str(source)
    try:
        return data.decode(), str(source)
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{source} is neither text nor MLIR bytecode", remedy="name a file with a StableHLO module"
        ) from error


def _parse(context: Any, data: str | bytes) -> Any:
    if isinstance(data, bytes):
        try:
            return stablehlo.deserialize_portable_artifact(context, data)
        except (ir.MLIRError, ValueError):
            return ir.Module.parse(data)  # plain bytecode
    return ir.Module.parse(data)


def _module(module: Any, entry: Any, place: str) -> StablehloModule:
    kind = ir.FunctionType(entry.attributes["function_type"].value)
    given = [_NAMED.match(str(a.location)) for a in entry.regions[0].blocks[0].arguments]
    inputs = _unique([g[1] if g and ".mlir" not in g[1] and g[1] != "-" else "" for g in given], "arg{}")
    infos = list(entry.attributes["res_attrs"]) if "res_attrs" in entry.attributes else []
    called = [_text(i["jax.result_info"]) if "jax.result_info" in i else "" for i in map(ir.DictAttr, infos)]
    outputs = _unique([c.removeprefix("result") for c in called] or [""] * len(kind.results), "[{}]")
    had = _without_shardings(module, entry)
    notes = ("shardings that the module had are replaced by the plan's",) if had else ()
    return StablehloModule(
        _text(module.operation.attributes["sym_name"]) if "sym_name" in module.operation.attributes else "module",
        module,
        entry,
        tuple(Argument(n, *type_of(t, place)) for n, t in zip(inputs, kind.inputs, strict=True)),
        tuple(Argument(n, *type_of(t, place)) for n, t in zip(outputs, kind.results, strict=True)),
        notes,
    )


def _unique(names: list[str], other: str) -> list[str]:
    """``names``, or numbered ones where some are missing or equal."""
    return names if all(names) and len(set(names)) == len(names) else [other.format(n) for n in range(len(names))]


def _text(attribute: Any) -> str:
    return str(ir.StringAttr(attribute).value)


def type_of(type: Any, place: str) -> tuple[tuple[int, ...], str]:
    """Shape and element type of an MLIR type. TraceError where its shape is not known, or it is no tensor."""
    try:
        ranked = ir.RankedTensorType(type)
    except ValueError as error:
        raise TraceError(f"{place} has a value of type {type}", cause="only tensors can be planned") from error
    if not ranked.has_static_shape:
        raise TraceError(
            f"{place} has a value of type {type}, whose shape is not known",
            remedy="export the module with fixed shapes",
        )
    return tuple(ranked.shape), str(ranked.element_type)


def _without_shardings(module: Any, entry: Any) -> bool:
    """Removes meshes and shardings of arguments, results and operations; whether there were any."""
    matches = False
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh":
            op.operation.erase()
            matches = True
    for key in ("arg_attrs", "res_attrs"):
        if key not in entry.attributes:
            continue
        kept = []
        for attrs in entry.attributes[key]:
            named = named_attributes(attrs)
            matches = matches or any(n in _OLD for n in named)
            kept.append(ir.DictAttr.get({n: a for n, a in named.items() if n not in _OLD}))
        entry.attributes[key] = ir.ArrayAttr.get(kept)
    for op in list(walk(entry.regions[0].blocks[0])):
        if op.operation.name in ("sdy.sharding_constraint", "sdy.propagation_barrier") or _is_marker(op):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.operation.erase()
            matches = True
            continue
        for name in _OLD:
            if name in op.attributes:
                del op.attributes[name]
                matches = True
    return matches


def named_attributes(attributes: Any) -> dict[str, Any]:
    """The attributes of an argument or a result by name."""
    every: Any = ir.DictAttr(attributes)
    return {a.name: a.attr for a in every}


def _is_marker(op: Any) -> bool:
    """Whether an operation is a custom call that says where its operand lies."""
    return op.operation.name == "stablehlo.custom_call" and _text(op.attributes["call_target_name"]) == "Sharding"


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
