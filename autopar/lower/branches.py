"""Branches that keep different things in one buffer for their backward pass get a buffer each.

jax keeps what the branches of a ``cond`` save in common results, matched by shape alone. Where a batch has the size of
a parameter one branch saves examples and another the parameter in the same result, which then can be cut into
microbatches for one of them only. Here the branch that saves examples keeps the result; another returns zeros in it and
what it saved in a result of its own, or nothing where the branch of the backward pass can take the operand itself.
A loop stacks what its branches save; the loop of the backward pass gets a stack more, or the operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.loops import Scan
from autopar.lower.interpreter import scalar
from autopar.lower.microbatch.parts import Recorder, run_whole
from autopar.lower.microbatch.retrace import retraced
from autopar.lower.shared_results import Shared, shared_results


def with_own_buffers(traced: Traced) -> Traced:
    """``traced``, with a result of its own for what a branch saves next to examples of other branches."""
    shared = shared_results(traced.graph)
    if not shared:
        return traced

    def run(values: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        frame = _Frame(dict(values))
        _Run(shared, recorder).graph(traced.program, frame)
        return frame.env

    return retraced(traced, run)


@dataclass(frozen=True)
class _Saved:
    """What a branch saved apart.

    Args:
        operand: a name, or a literal.
        same: for each stack that the shared result is in, the outermost first, whether this is the same in every
            iteration and so has no such dim.
    """

    operand: Operand
    same: tuple[bool, ...] = ()


@dataclass
class _Frame:
    """Values of one run of a graph.

    Args:
        env: by name.
        apart: by shared result and branch, what that branch saved.
        path: as in `Shared`.
    """

    env: dict[str, Any]
    apart: dict[tuple[str, int], _Saved] = field(default_factory=dict)
    path: str = ""

    def read(self, operand: Operand) -> Any:
        """The value of an operand."""
        return scalar(operand) if isinstance(operand, Literal) else self.env[operand]

    def apart_from(self, operand: Operand) -> list[tuple[int, _Saved]]:
        """(branch, what it saved apart from the value ``operand``)."""
        return [(b, saved) for (name, b), saved in self.apart.items() if name == operand]


@dataclass(frozen=True)
class _Run:
    """A step run with the results of `Shared` apart."""

    shared: Sequence[Shared]
    recorder: Recorder

    def graph(self, bound: BoundGraph, frame: _Frame) -> None:
        """Puts every value of ``bound`` into ``frame``."""
        for op in bound.graph.operators:
            saved = [s for s in self.shared if s.path == frame.path and s.cond.id == op.id]
            takes = any(frame.apart_from(o) for o in op.operands)
            inside = any(s.path.startswith(f"{frame.path}{op.id}/") for s in self.shared)
            if op.primitive == "scan" and (takes or inside):
                with self.recorder.around(op):
                    self._scan(bound, op, frame)
            elif op.primitive == "cond" and (takes or saved):
                with self.recorder.around(op):
                    self._cond(bound, op, saved, frame)
            else:
                part = BoundGraph(Graph(bound.graph.name, (), (op,), ()), bound.bounds, bound.constants)
                frame.env.update(run_whole(part, frame.env, self.recorder))

    def _cond(self, bound: BoundGraph, op: Operator, saved: Sequence[Shared], frame: _Frame) -> None:
        """A cond that saves some results apart, takes some that were, or does both."""
        more: list[tuple[Shared, int]] = []
        for s in saved:
            for branch in s.others:
                passed = s.operand(branch)
                if passed is None:
                    more.append((s, branch))
                frame.apart[s.name, branch] = _Saved(f"{s.name}@{branch}" if passed is None else passed)
        given = [frame.read(o) for o in op.operands]
        wanted = [(n, b, o) for n, operand in enumerate(op.operands) for b, o in frame.apart_from(operand) if n]
        extra = [frame.read(o.operand) for _, _, o in wanted]

        def branch_of(number: int) -> Any:
            def run(*operands: Any) -> list[Any]:
                taken = list(operands[: len(op.operands) - 1])
                for (n, b, _), value in zip(wanted, operands[len(taken) :], strict=True):
                    if b == number:
                        taken[n - 1] = value
                results = self._region(bound, op, number, taken)
                kept = [results[s.result] if b == number else _zeros(s) for s, b in more]
                for s in saved:
                    if number in s.others:
                        results[s.result] = _zeros(s)
                return [*results, *kept]

            return run

        branches = [branch_of(n) for n in range(len(op.regions))]
        results = lax.switch(given[0], branches, *given[1:], *extra)
        names = [*(v.name for v in op.results), *(f"{s.name}@{b}" for s, b in more)]
        frame.env.update(zip(names, results, strict=True))

    def _scan(self, bound: BoundGraph, op: Operator, frame: _Frame) -> None:
        """A loop with such conds in its body."""
        scan = Scan.of(op)
        params, region = bound.bounds[op.id].params, bound.bounds[op.id].regions["body"]
        inputs = [i.name for i in region.graph.inputs]
        consts, initial, stacks = scan.split([frame.read(o) for o in op.operands])
        taken = [(n, b, o) for n, operand in enumerate(op.operands) for b, o in frame.apart_from(operand)]
        sliced = [(n, b, o) for n, b, o in taken if n >= scan.num_whole and not o.same[0]]
        leaving: list[tuple[str, int, _Saved]] = []  # a shared result of the body, its branch, what it saved

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            stacked, more = slices[: len(stacks)], slices[len(stacks) :]
            inner = _Frame(dict(zip(inputs, [*consts, *carry, *stacked], strict=True)), path=f"{frame.path}{op.id}/")
            values = {(n, b): frame.read(o.operand) for n, b, o in taken}
            values |= {(n, b): value for (n, b, _), value in zip(sliced, more, strict=True)}
            for n, b, o in taken:
                name = f"{inputs[n]}@{b}"
                inner.env[name] = values[n, b]
                inner.apart[inputs[n], b] = _Saved(name, o.same[1:] if n >= scan.num_whole else o.same)
            self.graph(region, inner)
            leaving[:] = _leaving(op, scan, inner, frame)
            outputs = [jnp.asarray(inner.read(o.operand)) for o in region.graph.outputs]
            values_saved = [jnp.asarray(inner.read(o.operand)) for _, _, o in leaving]
            return outputs[: scan.num_carry], [*outputs[scan.num_carry :], *values_saved]

        xs = [*stacks, *(frame.read(o.operand) for _, _, o in sliced)]
        carry, ys = lax.scan(
            body, initial, xs, length=scan.length, reverse=bool(params["reverse"]), unroll=params.get("unroll", 1)
        )
        plain = len(op.results) - scan.num_carry
        frame.env.update(zip((v.name for v in op.results), [*carry, *ys[:plain]], strict=True))
        for (name, b, saved), stack in zip(leaving, ys[plain:], strict=True):
            for result in _stacks(op, scan, name):
                frame.env[f"{result}@{b}"] = stack
                frame.apart[result, b] = _Saved(f"{result}@{b}", (False, *saved.same))

    def _region(self, bound: BoundGraph, op: Operator, number: int, operands: Sequence[Any]) -> list[Any]:
        region = bound.bounds[op.id].regions[op.regions[number][0]]
        inputs = (i.name for i in region.graph.inputs)
        env = run_whole(region, dict(zip(inputs, operands, strict=True)), self.recorder)
        return [
            jnp.asarray(scalar(o.operand) if isinstance(o.operand, Literal) else env[o.operand])
            for o in region.graph.outputs
        ]


def _leaving(op: Operator, scan: Scan, inner: _Frame, frame: _Frame) -> list[tuple[str, int, _Saved]]:
    """What a loop has to stack of what branches of its body saved apart.

    What the loop was given, a constant or a stack, is recorded in ``frame`` as what was saved.
    """
    carried = range(scan.num_consts, scan.num_whole)
    given = {i.name: n for n, i in enumerate(scan.body.inputs) if n not in carried}
    leaving = []
    for (name, b), saved in inner.apart.items():
        stacks = _stacks(op, scan, name)
        if saved.operand not in given:
            leaving += [(name, b, saved)] if stacks else []
            continue
        for result in stacks:
            n = given[str(saved.operand)]
            frame.apart[result, b] = _Saved(op.operands[n], (n < scan.num_consts, *saved.same))
    return leaving


def _stacks(op: Operator, scan: Scan, name: str) -> list[str]:
    """Results of a loop that stack the value ``name`` of its body."""
    return [v.name for v, o in zip(op.results, scan.body.outputs, strict=True) if o.operand == name]


def _zeros(s: Shared) -> Any:
    type = s.cond.results[s.result].type
    return jnp.zeros(type.shape, numpy_dtype(type.dtype))
