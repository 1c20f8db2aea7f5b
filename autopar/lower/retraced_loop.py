"""`RetracedLoop`: a loop of a program as it is traced again, with another body.

Rewritings of loops over layers take the loop's operands apart, run its body, or a part of it, in trips of a new loop,
and give what that makes the names of the old results. `RetracedLoop.of` begins; `over` makes the new loop; `trip` runs
the body. It decides nothing: what a trip reads, writes and leaves out is the rewriting's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import Bound, BoundGraph
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.analysis import closure
from autopar.ir.loops import Scan
from autopar.ir.phases import marks_of
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder, run_whole
from autopar.recompute.rewrite import AGAIN, SCOPE


@dataclass(frozen=True)
class RetracedLoop:
    """A loop as it is traced again.

    Args:
        op: the loop.
        scan: its parts.
        bound: its primitive and parameters.
        recorder: see there.
        consts: what each trip takes whole.
        initial: what enters the first trip.
        names: of the stacks that it takes in slices; "" of a literal.
        stacks: these.
    """

    op: Operator
    scan: Scan
    bound: Bound
    recorder: Recorder
    consts: Sequence[Any]
    initial: Sequence[Any]
    names: Sequence[str]
    stacks: Sequence[Any]

    @staticmethod
    def of(bound: BoundGraph, op: Operator, env: Mapping[str, Any], recorder: Recorder, mark: str = "") -> RetracedLoop:
        """The loop ``op`` of a graph.

        Args:
            bound: the graph.
            op: the loop.
            env: values that it takes, by name.
            recorder: see there.
            mark: what the new loop is besides, see `autopar.ir.phases`; its scope says so too.
        """
        scan = Scan.of(op)
        consts, initial, stacks = scan.split([scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands])
        names = [o if isinstance(o, str) else "" for o in op.operands[scan.num_whole :]]
        if mark:
            op = replace(op, scope=f"{op.scope}/{mark}" if op.scope else mark, marks=marks_of(op.marks, (mark,)))
        return RetracedLoop(op, scan, bound.bounds[op.id], recorder, consts, initial, names, stacks)

    @property
    def region(self) -> BoundGraph:
        """Its body."""
        return self.bound.regions["body"]

    @property
    def results(self) -> tuple[list[str], list[str]]:
        """Names of its carries and stacks."""
        return self.scan.split_results([v.name for v in self.op.results])

    def over(self, body: Any, initial: Any, xs: Any, length: int | None = None, unroll: Any = 1) -> tuple[Any, Any]:
        """``lax.scan`` in the direction of this loop, under its marks.

        Args:
            body: of (carries, slices), gives (carries, slices of results).
            initial: carries.
            xs: stacks.
            length: number of trips, where there may be no stacks.
            unroll: trips that the compiler sees at once.
        """
        reverse = bool(self.bound.params["reverse"])
        with self.recorder.around(self.op):
            carry, ys = lax.scan(body, initial, xs, length=length, reverse=reverse, unroll=unroll)
        return carry, ys

    def values(self, carry: Sequence[Any], slices: Sequence[Any]) -> dict[str, Any]:
        """Inputs of its body in a trip, by name."""
        names = (i.name for i in self.region.graph.inputs)
        return dict(zip(names, [*self.consts, *carry, *slices], strict=True))

    def trip(
        self, carry: Sequence[Any], slices: Sequence[Any], wanted: Sequence[int], *, again: bool = False
    ) -> list[Any]:
        """Outputs of its body, those whose numbers are ``wanted``.

        Args:
            carry: what enters a layer.
            slices: of its stacks.
            wanted: numbers among carries and slices of results.
            again: whether this is the second run, in the backward pass.
        """
        graph = self.region.graph
        outputs = [graph.outputs[n].operand for n in wanted]
        operators = closure(graph.operators, outputs)
        if again:
            operators = [_again(o) for o in operators]
        part = replace(self.region, graph=Graph(graph.name, graph.inputs, tuple(operators), graph.outputs))
        values = run_whole(part, self.values(carry, slices), self.recorder)
        return [read(o, values) for o in outputs]


def read(operand: Operand, values: Mapping[str, Any]) -> Any:
    """The array of an operand; a literal as one of its own."""
    return jnp.asarray(scalar(operand)) if isinstance(operand, Literal) else values[operand]


def _again(op: Operator) -> Operator:
    """An operator that runs again in the backward pass."""
    return replace(op, scope=f"{op.scope}/{SCOPE}" if op.scope else SCOPE, marks=marks_of(op.marks, AGAIN))
