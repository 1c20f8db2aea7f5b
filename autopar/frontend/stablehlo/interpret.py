"""Runs a StableHLO module with jax's operators, so that jax traces what it computes.

`traced_module` traces the module's entry function. `ModuleInterpreter` runs operations under marks that say which one
is at work; `autopar.frontend.stablehlo.operations` has the table of what each computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir

from autopar.errors import TraceError
from autopar.frontend.build import build_graph
from autopar.frontend.order import order
from autopar.frontend.retraced import Labels
from autopar.frontend.roles import assign_roles
from autopar.frontend.signature import SignatureOptions, flatten_call
from autopar.frontend.stablehlo.module import StablehloModule, type_of
from autopar.frontend.stablehlo.operations import CONTRACTIONS, ELEMENTWISE, SHAPES
from autopar.frontend.stablehlo.reader import Operation, dtype_of, scope_text, word_of
from autopar.frontend.trace import Traced
from autopar.ir.phases import BACKWARD, FORWARD

_ROOT = re.compile(r"\w+")
_WIDE = ("i64", "ui64", "f64", "complex<f64>")
_RETURNS = frozenset({"func.return", "stablehlo.return"})


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


@dataclass
class ModuleInterpreter:
    """Interprets a module under marks that say which operation is at work.

    Args:
        module: the module.
        labels: gets a mark for each operation; its id is the operation's number.
        numbers: number of each operation.
    """

    module: StablehloModule
    labels: Labels = field(default_factory=Labels)
    numbers: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers.update((op.operation, n) for n, op in enumerate(self.module.operations()))

    def run(self, *arrays: Any) -> list[Any]:
        """Results of the entry function."""
        return self.block(self.module.block, arrays, {})

    def block(self, block: Any, arrays: Sequence[Any], outside: Mapping[Any, Any]) -> list[Any]:
        """Results of a block.

        Args:
            block: the block.
            arrays: its arguments.
            outside: values of the blocks around it, which it may read.
        """
        env = dict(outside)
        env.update(zip(block.arguments, arrays, strict=True))
        for op in block.operations:
            if op.operation.name in _RETURNS:
                return [jnp.asarray(env[o]) for o in op.operands]
            operation = Operation(op, self.numbers.get(op.operation, 0))
            place, scope = operation.place, _scope(op.location)
            with jax.named_scope(self.labels.mark(scope, place, str(operation.number), _marks(scope))):
                results = self._apply(operation, [env[o] for o in op.operands], env)
            result = results if isinstance(results, list | tuple) else [results]
            env.update(zip(op.results, result, strict=True))
        return []

    def _apply(self, op: Operation, values: list[Any], env: Mapping[Any, Any]) -> Any:
        if op.name in ELEMENTWISE:
            return ELEMENTWISE[op.name](op, *values)
        if op.name in SHAPES:
            return SHAPES[op.name](op, *values)
        if op.name in CONTRACTIONS:
            return CONTRACTIONS[op.name](op, lambda region, given: self._region(region, given, env), *values)
        if op.name in _CONTROL:
            return _CONTROL[op.name](self, op, values, env)
        if op.name == "stablehlo.custom_call":
            return _custom_call(op, values)
        raise op.unknown()

    def _region(self, region: Any, values: Sequence[Any], env: Mapping[Any, Any]) -> list[Any]:
        return self.block(region.blocks[0], values, env)

    def while_loop(self, op: Operation, values: list[Any], env: Mapping[Any, Any]) -> list[Any]:
        """``stablehlo.while``; a loop that counts to a constant is one with a known number of iterations."""
        cond, body = op.op.regions
        initial = [jnp.asarray(v) for v in values]
        length = trips(op.op)
        if length is not None:
            return list(
                lax.scan(lambda c, _: (self._region(body, list(c), env), None), initial, None, length=length)[0]
            )
        return list(
            lax.while_loop(
                lambda c: self._region(cond, list(c), env)[0], lambda c: self._region(body, list(c), env), initial
            )
        )

    def case(self, op: Operation, values: list[Any], env: Mapping[Any, Any]) -> list[Any]:
        """``stablehlo.case``: the last branch where the index is none of a branch."""
        regions, index = list(op.op.regions), values[0]
        last = len(regions) - 1
        number = lax.select(lax.bitwise_or(index < 0, index > last), jnp.full_like(index, last), index)
        return list(lax.switch(number, [lambda r=r: self._region(r, (), env) for r in regions]))

    def if_else(self, op: Operation, values: list[Any], env: Mapping[Any, Any]) -> list[Any]:
        """Results of ``stablehlo.if``."""
        yes, no = op.op.regions
        return list(lax.cond(values[0], lambda: self._region(yes, (), env), lambda: self._region(no, (), env)))


_CONTROL: Mapping[str, Callable[..., list[Any]]] = MappingProxyType(
    {
        "stablehlo.case": ModuleInterpreter.case,
        "stablehlo.if": ModuleInterpreter.if_else,
        "stablehlo.while": ModuleInterpreter.while_loop,
    }
)


def trips(op: Any) -> int | None:
    """Iterations of a ``stablehlo.while`` whose counter goes by one from one constant to another; None for others."""
    cond, body = (region.blocks[0] for region in op.regions)
    compared, returned = cond.operations[len(cond.operations) - 2], body.operations[len(body.operations) - 1]
    if compared.operation.name != "stablehlo.compare" or "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    counters = [n for n, a in enumerate(cond.arguments) if a == compared.operands[0]]
    if len(counters) != 1 or list(cond.operations[len(cond.operations) - 1].operands) != list(compared.results):
        return None
    (n,) = counters
    added = returned.operands[n].owner
    steps = getattr(added, "name", "") == "stablehlo.add" and added.operands[0] == body.arguments[n]
    first, end = _number(op.operands[n]), _number(compared.operands[1])
    if not steps or _number(added.operands[1]) != 1 or first is None or end is None:
        return None
    return max(0, end - first)


def _number(value: Any) -> int | None:
    """The number that a value is, where a constant makes it."""
    if getattr(value.owner, "name", "") != "stablehlo.constant":
        return None
    attribute = value.owner.attributes["value"]
    is_one = isinstance(attribute, ir.DenseIntElementsAttr) and attribute.is_splat
    return int(attribute.get_splat_value().value) if is_one else None


def _custom_call(op: Operation, values: Sequence[Any]) -> list[Any]:
    """A kernel of a library: it has shapes and runs whole on every device."""
    result = [jax.core.ShapedArray(*_typed(r.type, op)) for r in op.op.results]
    primitive = Primitive(f"custom_call_{word_of(op.op.attributes['call_target_name'])}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, **__: result)
    return list(primitive.bind(*values))


def _typed(type: Any, op: Operation) -> tuple[tuple[int, ...], Any]:
    shape, element = type_of(type, op.place)
    return shape, dtype_of(element, op.place)


def _marks(scope: str) -> tuple[str, ...]:
    """Marks of an operation, of whose transformations a module has the text alone."""
    if "transpose(" in scope or "rematted_computation" in scope:
        return (BACKWARD,)
    return (FORWARD,) if "jvp(" in scope else ()


def _scope(location: Any) -> str:
    """The name stack that jax wrote into a location, without the primitive at its end."""
    return scope_text(location).rpartition("/")[0]
