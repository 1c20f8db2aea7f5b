"""Functions that are traced again from a graph: the origins of their operators, and operators taken over unchanged.

`Labels` marks what is traced, so that its operators keep the scopes, source lines and ids of those that they replace.

A rewriting traces what it adds, as a loop around layers. What it leaves as it was is one equation of the trace,
`spliced`: jax sees the types of what enters and leaves it, and `build_graph` takes its operators over unchanged. Where
a jaxpr with such an equation is compiled, the equation runs them by their primitives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar._compat.dtypes import numpy_dtype
from autopar._compat.jaxprs import scalar_of
from autopar._compat.primitives import bind
from autopar.ir import Literal, Operator
from autopar.ir.analysis import names_made

_MARK = "autopar#"


@dataclass(frozen=True)
class Label:
    """A mark, and the function traced under it.

    Args:
        scope: of the operator.
        source: its line; None leaves that which jax recorded.
        id: of the operator that it stands for; None for none, or under a mark of an earlier trace.
        marks: attributes of the operator, as "recomputed".
    """

    scope: str
    source: str | None
    id: str | None
    marks: tuple[str, ...] = ()


@dataclass
class Labels:
    """Scopes, source lines, ids and marks of operators by the mark under which something is traced.

    A function that interprets a graph has jax record the interpreter's own lines; under a mark it records
    which operator it was at. Bodies of loops and branches keep the marks of the trace that they were made in: those of
    earlier traces stand for scopes, lines and marks alone.
    """

    entries: list[Label] = field(default_factory=list)
    known: dict[Label, int] = field(default_factory=dict)
    earlier: int = 0

    @staticmethod
    def after(labels: Labels | None) -> Labels:
        """Marks for another trace of what was traced under ``labels``."""
        entries = [] if labels is None else list(labels.entries)
        return Labels(entries, earlier=len(entries))

    def mark(self, scope: str, source: str | None, id: str | None, marks: tuple[str, ...] = ()) -> str:
        """A name for ``jax.named_scope``, under which an operator is traced.

        Args:
            scope: of the operator.
            source: its line; None leaves that which jax recorded.
            id: of the operator that it stands for; None for none.
            marks: its attributes, as "recomputed".
        """
        entry = Label(scope, source, id, marks)
        if entry not in self.known:
            self.known[entry] = len(self.entries)
            self.entries.append(entry)
        return f"{_MARK}{self.known[entry]}"

    def origin(self, stack: str) -> Label | None:
        """The innermost mark in a name stack; None if there is none."""
        _, mark, rest = stack.rpartition(_MARK)
        if not mark:
            return None
        number = int(rest.partition("/")[0].partition(")")[0])
        label = self.entries[number]
        return replace(label, id=None) if number < self.earlier else label


@dataclass(frozen=True, eq=False)
class Splice:
    """Operators of an old graph that are copied into a new one without jax.

    Args:
        operators: in running order.
        bounds: by their ids the primitive, parameters and regions of each, as in a `BoundGraph`.
        origins: by id of an operator that stands for another the id of that one.
        taken: names of values that they take from elsewhere.
        results: names of values that they make.
    """

    operators: tuple[Operator, ...]
    bounds: Mapping[str, Any]
    origins: Mapping[str, str]
    taken: tuple[str, ...]
    results: tuple[str, ...]


def _types(*operands: Any, splice: Splice) -> list[Any]:
    types = [v.type for op in splice.operators for v in op.results]
    return [jax.core.ShapedArray(t.shape, numpy_dtype(t.dtype)) for t in types]


def _run(*operands: Any, splice: Splice) -> list[Any]:
    env = dict(zip(splice.taken, operands, strict=True))
    for op in splice.operators:
        bound = splice.bounds[op.id]
        values = [scalar_of(o.text, o.type.dtype) if isinstance(o, Literal) else env[o] for o in op.operands]
        outputs = bind(bound.primitive, bound.params, values)
        env.update(zip((v.name for v in op.results), outputs, strict=True))
    return [env[name] for name in splice.results]


def _made() -> Primitive:
    primitive = Primitive("spliced")
    primitive.multiple_results = True
    primitive.def_abstract_eval(_types)
    primitive.def_impl(_run)
    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=True))
    return primitive


spliced_p = _made()


def may_splice(op: Operator) -> bool:
    """Whether an operator may be copied into a new graph without jax: it has no effect, and returns arrays of numbers.

    What takes numbers of the program alone is bound again: jax computes some of it at once.
    """
    types = (v.type.dtype for v in op.results)
    return bool(op.reads) and not op.effects and not any(t == "token" or t.startswith("key<") for t in types)


def spliced(
    operators: Sequence[Operator], bounds: Mapping[str, Any], origins: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Values that operators make, by name.

    Args:
        operators: some that `may_splice`, in running order.
        bounds: by id of an operator its primitive, parameters and regions.
        origins: by id of an operator that stands for another the id of that one.
        values: arrays of the function that is traced, by name.
    """
    results = names_made(operators)
    inside = set(results)
    taken = tuple(dict.fromkeys(o for op in operators for o in op.reads if o not in inside))
    splice = Splice(tuple(operators), bounds, origins, taken, tuple(results))
    apply: Any = spliced_p.bind
    return dict(zip(results, apply(*(values[name] for name in taken), splice=splice), strict=True))
