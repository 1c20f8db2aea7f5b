"""`Graph`: a traced function as plain, frozen data, without jax.

A graph is a list of operators in an order in which they can run. Values are named; the name of an
operator's only result is the operator's id, several results append ``:0``, ``:1``. Operators with
bodies (scan, while, cond) hold them as regions, each a graph of its own whose names are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from autopar.ir.types import TensorType

#: What a function finds in a graph.
Fact = TypeVar("Fact")

Attr: TypeAlias = "bool | int | float | str | tuple[Attr, ...] | None"

#: What an input of a graph is for.
ROLES = ("parameter", "optimizer", "batch", "other", "constant", "activation")


@dataclass(frozen=True, slots=True)
class Literal:
    """A scalar written into the program: its value as text that Python reads back, and its type."""

    text: str
    type: TensorType

    @property
    def is_zero(self) -> bool:
        """Whether the value is 0, of any numeric type."""
        return self.text in ("0", "0.0", "-0.0", "False", "0j")


Operand: TypeAlias = str | Literal


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a graph.

    Args:
        name: unique name of the value, the text of its path in the arguments.
        type: shape and dtype.
        role: one of `ROLES`; "activation" of what another program of a stage left.
    """

    name: str
    type: TensorType
    role: str = "other"


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a graph: what it returns, under which path, and the input that it replaces.

    Args:
        operand: the value returned, or a literal.
        path: text of its path in the results.
        type: shape and dtype.
        updates: name of the input that the next call takes this output for, or None.
    """

    operand: Operand
    path: str
    type: TensorType
    updates: str | None = None


@dataclass(frozen=True)
class Operator:
    """One primitive applied to operands.

    Args:
        id: unique in its graph, stable under changes elsewhere: scope, primitive and a count.
        primitive: jax's name of the primitive, as ``dot_general``.
        operands: names of values, or literals.
        results: values that it makes.
        attrs: parameters that matter to planning, sorted by name (`attr` reads one).
        regions: bodies: ("body", graph) of scan; ("cond", g), ("body", g) of while; ("0", g).. of cond.
        source: the user's line as ``file.py:12 (function)``, or "".
        scope: name stack, as ``jvp(layer0)/attention``, or "".
        effects: names of side effects; an operator with some is never removed.
        marks: what it is, as whoever made it says (`autopar.ir.phases`), sorted.
    """

    id: str
    primitive: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    regions: tuple[tuple[str, Graph], ...] = ()
    source: str = ""
    scope: str = ""
    effects: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it takes, in the order of the operands; literals are left out."""
        return tuple(o for o in self.operands if isinstance(o, str))

    def attr(self, name: str) -> Attr:
        """The parameter ``name``; KeyError if the operator has none of that name."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.id} has no attribute {name!r}")

    def ints(self, name: str) -> tuple[int, ...]:
        """The parameter ``name``, a tuple of ints."""
        value = self.attr(name)
        if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
            raise TypeError(f"attribute {name!r} of {self.id} is {value!r}, not ints")
        return value  # type: ignore[return-value]

    def integer(self, name: str) -> int:
        """The parameter ``name``, an int."""
        value = self.attr(name)
        if not isinstance(value, int):
            raise TypeError(f"attribute {name!r} of {self.id} is {value!r}, not an int")
        return value

    def region(self, name: str) -> Graph:
        """The body called ``name``."""
        return dict(self.regions)[name]


@dataclass(frozen=True)
class Graph:
    """Inputs, operators in running order, outputs. Made by the frontend, checked by `verify`."""

    name: str
    inputs: tuple[Input, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[Output, ...] = field(default=())

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Type of every value by name (not those inside regions)."""
        types = {i.name: i.type for i in self.inputs}
        types.update((v.name, v.type) for op in self.operators for v in op.results)
        return types

    @cached_property
    def producers(self) -> dict[str, Operator]:
        """The operator that makes each value; inputs are not in it."""
        return {v.name: op for op in self.operators for v in op.results}

    @cached_property
    def by_id(self) -> dict[str, Operator]:
        """Operators by id."""
        return {op.id: op for op in self.operators}

    @cached_property
    def _facts(self) -> dict[Callable[[Graph], Any], Any]:
        """Results of `fact`."""
        return {}

    def fact(self, find: Callable[[Graph], Fact]) -> Fact:
        """The result of a function of a graph alone, for this graph; computed once.

        Args:
            find: a function or a class of a module, whose result nobody changes.
        """
        if find not in self._facts:
            self._facts[find] = find(self)
        fact: Fact = self._facts[find]
        return fact

    def type_of(self, operand: Operand) -> TensorType:
        """Type of a value or a literal."""
        return operand.type if isinstance(operand, Literal) else self.types[operand]

    def operand_types(self, op: Operator) -> tuple[TensorType, ...]:
        """Types of what ``op`` takes, one an operand."""
        return tuple(self.type_of(o) for o in op.operands)
