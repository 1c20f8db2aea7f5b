"""Branches that keep different things in one buffer for their backward pass get a buffer each.

jax keeps what the branches of a ``cond`` save in common results, matched by shape alone. Where a batch has the size of
a parameter one branch saves examples and another the parameter in the same result, which then can be cut into
microbatches for one of them only. Here the branch that saves examples keeps the result; another returns zeros in it and
what it saved in a result of its own, or nothing where the branch of the backward pass can take the operand itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import dependents, names_made
from autopar.ir.primitives import is_generator
from autopar.lower.interpreter import scalar
from autopar.lower.microbatch.parts import Recorder, run_whole
from autopar.lower.microbatch.retrace import retraced


@dataclass(frozen=True)
class _Shared:
    """A result in which some branches of a cond save examples, and others do not.

    Args:
        cond: the operator.
        result: number of the result.
        others: numbers of the branches that save something else.
    """

    cond: Operator
    result: int
    others: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the result."""
        return self.cond.results[self.result].name

    def operand(self, branch: int) -> str | Literal | None:
        """What lies outside that a branch passes on; None where it computes what it saves."""
        region = self.cond.regions[branch][1]
        names = [i.name for i in region.inputs]
        passed = region.outputs[self.result].operand
        return self.cond.operands[1 + names.index(passed)] if passed in names else None


def with_own_buffers(traced: Traced) -> Traced:
    """``traced``, with a result of its own for what a branch saves beside examples of other branches."""
    shared = _shared(traced.graph)
    if not shared:
        return traced
    return retraced(traced, _Run(traced.program, shared).run)


def _shared(graph: Graph) -> list[_Shared]:
    conds = [op for op in graph.operators if op.primitive == "cond" and not op.effects]
    if len(conds) < 2:
        return []
    batch = {i.name for i in graph.inputs if i.role == "batch"}
    of_batch = batch | set(names_made(dependents(graph.operators, batch)))
    returned = {o.operand for o in graph.outputs}
    shared = []
    for op in conds:
        saving = [_of_batch(op, region, of_batch) for _, region in op.regions]
        for n, value in enumerate(op.results):
            others = tuple(b for b, kept in enumerate(saving) if kept[n] is False)
            readers = [r for r in graph.operators if value.name in r.reads]
            again = all(r.primitive == "cond" and r.operands[0] == op.operands[0] for r in readers)
            mixed = bool(others) and any(kept[n] for kept in saving)
            if mixed and again and readers and value.name not in returned:
                shared.append(_Shared(op, n, others))
    return shared


def _of_batch(op: Operator, region: Graph, of_batch: set[str]) -> list[bool | None]:
    """Whether each output of a branch depends on examples; None for what can be made in any layout."""
    given = {i.name for i, o in zip(region.inputs, op.operands[1:], strict=True) if o in of_batch}
    reached = given | set(names_made(dependents(region.operators, given)))

    def one(operand: Any) -> bool | None:
        maker = None if isinstance(operand, Literal) else region.producers.get(operand)
        free = isinstance(operand, Literal) or (maker is not None and is_generator(maker))
        return None if free else operand in reached

    return [one(o.operand) for o in region.outputs]


@dataclass(frozen=True)
class _Run:
    """A step run with the results of `_Shared` apart."""

    program: BoundGraph
    shared: Sequence[_Shared]

    def run(self, values: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        """Every value of the step."""
        env = dict(values)
        apart: dict[tuple[str, int], Any] = {}  # what a branch saved, by the result it shared
        graph = self.program.graph
        mine = {s.name for s in self.shared}
        for op in graph.operators:
            own = [s for s in self.shared if s.cond.id == op.id]
            taken = [n for n, o in enumerate(op.operands) if n and o in mine]
            if own:
                with recorder.around(op):
                    self._saving(op, own, env, apart, recorder)
            elif taken:
                with recorder.around(op):
                    self._taking(op, taken, env, apart, recorder)
            else:
                part = Graph(graph.name, (), (op,), ())
                env = run_whole(BoundGraph(part, self.program.bounds, self.program.constants), env, recorder)
        return env

    def _saving(
        self, op: Operator, own: Sequence[_Shared], env: dict[str, Any], apart: dict[tuple[str, int], Any],
        recorder: Recorder,
    ) -> None:  # fmt: skip
        more: list[tuple[_Shared, int]] = []
        for s in own:
            for branch in s.others:
                passed = s.operand(branch)
                if passed is None:
                    more.append((s, branch))
                else:
                    apart[s.name, branch] = _value(passed, env)

        def saving(number: int) -> Any:
            def run(*operands: Any) -> list[Any]:
                results = self._branch(op, number, operands, recorder)
                kept = [results[s.result] for s, b in more if b == number]
                for s in own:
                    if number in s.others:
                        results[s.result] = _zeros(s)
                ours = iter(kept)
                return [*results, *(next(ours) if b == number else _zeros(s) for s, b in more)]

            return run

        results = _switch(op, saving, [_value(o, env) for o in op.operands])
        env.update(zip((v.name for v in op.results), results, strict=False))
        apart.update(((s.name, b), r) for (s, b), r in zip(more, results[len(op.results) :], strict=True))

    def _taking(
        self, op: Operator, taken: Sequence[int], env: dict[str, Any], apart: dict[tuple[str, int], Any],
        recorder: Recorder,
    ) -> None:  # fmt: skip
        wanted = {(n, b): value for n in taken for (name, b), value in apart.items() if name == op.operands[n]}
        order = {key: len(op.operands) - 1 + k for k, key in enumerate(wanted)}

        def taking(number: int) -> Any:
            def run(*operands: Any) -> list[Any]:
                given = list(operands[: len(op.operands) - 1])
                for (n, b), position in order.items():
                    if b == number:
                        given[n - 1] = operands[position]
                return self._branch(op, number, given, recorder)

            return run

        results = _switch(op, taking, [*(_value(o, env) for o in op.operands), *wanted.values()])
        env.update(zip((v.name for v in op.results), results, strict=True))

    def _branch(self, op: Operator, number: int, operands: Sequence[Any], recorder: Recorder) -> list[Any]:
        bound = self.program.bounds[op.id].regions[op.regions[number][0]]
        env = run_whole(bound, dict(zip((i.name for i in bound.graph.inputs), operands, strict=True)), recorder)
        return [jnp.asarray(_value(o.operand, env)) for o in bound.graph.outputs]


def _switch(op: Operator, branch: Any, operands: Sequence[Any]) -> list[Any]:
    made: list[Any] = lax.switch(operands[0], [branch(n) for n in range(len(op.regions))], *operands[1:])
    return made


def _value(operand: Any, env: Mapping[str, Any]) -> Any:
    return scalar(operand) if isinstance(operand, Literal) else env[operand]


def _zeros(s: _Shared) -> Any:
    type = s.cond.results[s.result].type
    return jnp.zeros(type.shape, numpy_dtype(type.dtype))
