"""Which arguments of a train step are a model that is not trained: the base under adapters, a teacher.

Forward products sum over the first dim of such an argument's arrays against activations, and keep that of none, while
they keep the first dim of examples. A product with another argument says nothing, for features may lie first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from autopar.frontend.first_dims import dim_in_result
from autopar.frontend.models import may_be_batch
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of

_NONE: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class _FirstDims:
    """Where the first dims of inputs are in a value.

    Args:
        plain: (input, dim of the value) where the value is the input, cast, transposed or scaled.
        mixed: likewise where something was added to it.
    """

    plain: frozenset[tuple[str, int]] = _NONE
    mixed: frozenset[tuple[str, int]] = _NONE


@dataclass
class _Products:
    """Inputs by what forward products do to their first dims."""

    summed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def walk(self, graph: Graph, inputs: Mapping[str, _FirstDims]) -> None:
        """Reads the operators of a graph whose inputs have these first dims."""
        known = dict(inputs)
        for op in graph.operators:
            if phase_of(op) == "backward":
                continue
            dims = [known.get(o, _FirstDims()) if isinstance(o, str) else _FirstDims() for o in op.operands]
            if op.primitive == "dot_general":
                self._product(op, dims)
            elif op.primitive == "conv_general_dilated":
                self.kept |= {name for name, _ in dims[0].mixed}
                self.summed |= set() if dims[0].plain else {name for name, _ in dims[1].mixed}
            elif op.primitive == "scan":
                scan = Scan.of(op)
                constants, carries, stacks = scan.split(dims)
                given = [*constants, *(_FirstDims() for _ in carries), *stacks]
                self.walk(scan.body, dict(zip((i.name for i in scan.body.inputs), given, strict=True)))
            elif dims:
                passed = _passed_on(op, dims, graph.type_of(op.operands[0]))
                known.update((r.name, passed) for r in op.results)

    def _product(self, op: Operator, dims: Sequence[_FirstDims]) -> None:
        numbers: Any = op.attr("dimension_numbers")
        summed = numbers[0]
        for n, mine in enumerate(dims):
            over = set(summed[n])
            self.kept |= {name for name, dim in mine.mixed if dim not in over}
            if not dims[1 - n].plain:
                self.summed |= {name for name, dim in mine.mixed if dim in over}


def _passed_on(op: Operator, dims: Sequence[_FirstDims], type: TensorType) -> _FirstDims:
    """Where first dims are in the results of ``op``, whose first operand has this type."""
    if op.primitive in ("add", "div", "mul", "sub"):
        scales = op.primitive in ("div", "mul")
        plain = frozenset().union(*(d.plain for d in dims)) if scales else _NONE
        return _FirstDims(plain, frozenset().union(*(d.mixed for d in dims)))

    def moved(part: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        places = ((name, dim_in_result(op, dim, type)) for name, dim in part)
        return frozenset((name, dim) for name, dim in places if dim is not None)

    return _FirstDims(moved(dims[0].plain), moved(dims[0].mixed))


def frozen_arguments(graph: Graph, arguments: Sequence[tuple[int | str, str]], carried: Set[str]) -> set[int | str]:
    """Arguments of a train step that are a model which is not trained.

    Args:
        graph: its inputs begin with the traced leaves.
        arguments: for each leaf its argument (position or name) and its path inside the argument.
        carried: names of inputs that come back.
    """
    leaves = [(i, a) for i, (a, _) in zip(graph.inputs, arguments, strict=False) if i.name not in carried]
    of_leaf = {i.name: a for i, a in leaves}
    products = _Products()
    first = {i.name: frozenset({(i.name, 0)}) for i in graph.inputs}
    products.walk(graph, {name: _FirstDims(dims, dims) for name, dims in first.items()})
    frozen = {of_leaf[n] for n in products.summed if n in of_leaf}
    frozen -= {of_leaf[n] for n in products.kept if n in of_leaf}
    others = {a for i, a in leaves if may_be_batch(i.type)} - frozen
    return frozen if others else set()
