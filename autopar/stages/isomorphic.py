"""Isomorphic stages: the same operators with the same wiring and types, under other names.

A model of equal layers has as many kinds of stages as it has different ends, and a kind in between. What is
found out about one stage of a kind holds for all of it, under a renaming (`StageKind.renaming`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Literal, Operator
from autopar.ir.fingerprint import structural_hash
from autopar.microbatch import Microbatching
from autopar.stages.parts import StageParts


@dataclass(frozen=True)
class StageKind:
    """Content of a stage without names, and the names that it has there.

    Args:
        key: equal for isomorphic stages.
        values: names of the values that it takes, in the order in which ``key`` numbers them.
        sent: names of values that it sends: in the loop, and after it.
        outputs: indices of the graph's outputs that it returns.
        operators: ids of its operators: before the loop, in it, after it.
    """

    key: tuple[object, ...]
    values: tuple[str, ...]
    sent: tuple[str, ...]
    outputs: tuple[int, ...]
    operators: tuple[str, ...]


class KindTable:
    """Finds which stages of a graph are isomorphic; it remembers what it compared of each operator."""

    def __init__(self, graph: Graph, microbatching: Microbatching) -> None:
        self.graph = graph
        self.microbatching = microbatching
        self.body_inputs = frozenset(microbatching.body_inputs)
        self.input_roles = {i.name: i.role for i in graph.inputs}
        self.by_operator: dict[str, tuple[object, ...]] = {}

    def kind(self, parts: StageParts) -> StageKind:
        """Content of a stage without names; stages of equal keys are isomorphic.

        Args:
            parts: operators, inputs and outputs of the stage.
        """
        graph = self.graph
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        taken: list[tuple[object, ...]] = []
        for group, names in (
            ("input", parts.inputs),
            ("piece", parts.microbatch_inputs),
            ("received", tuple(r.name for r in parts.received)),
            ("late", tuple(r.name for r in parts.received_late)),
            ("met", tuple(r.name for r in parts.received_met)),
        ):
            taken += [(group, number(n), self._outside(n)) for n in names]
        values = tuple(numbers)
        rows: list[object] = []
        ids = (*parts.before, *parts.body, *parts.late)
        for id in ids:
            op = graph.by_id[id]
            operands = tuple(o if isinstance(o, Literal) else number(o) for o in op.operands)
            rows.append((self._own(op), operands, tuple(number(v.name) for v in op.results), id in parts.backward))
        outputs = tuple(
            (
                o.operand if isinstance(o.operand, Literal) else number(o.operand),
                None if o.updates is None or o.updates not in numbers else number(o.updates),
                o.type,
            )
            for o in (graph.outputs[i] for i in parts.outputs)
        )
        key = (
            tuple(taken),
            len(parts.before),
            len(parts.body),
            tuple(rows),
            tuple((number(j.name), j.layout) for j in parts.joined),
            tuple(map(number, parts.sent)),
            tuple(map(number, parts.sent_late)),
            outputs,
            tuple((r.backward, number(r.name)) for r in parts.received),
            tuple(map(number, parts.sent_met)),
            tuple((r.part, number(r.name)) for r in parts.received_met),
        )
        return StageKind(key, values, (*parts.sent, *parts.sent_late, *parts.sent_met), parts.outputs, ids)

    def _outside(self, name: str) -> tuple[object, ...]:
        """Facts about an outer operand of a stage by which stages compare."""
        microbatching = self.microbatching
        return (
            self.graph.types[name],
            self.input_roles.get(name),
            microbatching.batch.get(name),
            name in self.body_inputs,
            self._layout(name),
        )

    def _layout(self, name: str) -> object:
        """The layout over microbatches in which a value of the loop is made."""
        op = self.graph.producers.get(name)
        if op is None or op.id not in self.microbatching.results:
            return None
        return self.microbatching.results[op.id][[v.name for v in op.results].index(name)]

    def _own(self, op: Operator) -> tuple[object, ...]:
        """An operator but for the names of what it takes and makes."""
        known = self.by_operator.get(op.id)
        if known is None:
            regions: tuple[object, ...] = ()
            if op.regions:
                inner = f"{op.id}/"
                regions = (
                    structural_hash(op, self.graph.operand_types(op)),
                    tuple(
                        (k.removeprefix(inner), self.microbatching.operands[k], self.microbatching.results[k])
                        for k in self.microbatching.operands
                        if k.startswith(inner)
                    ),
                )
            known = self.by_operator[op.id] = (
                op.primitive,
                repr(op.attrs),  # by text: 1, 1.0 and True are equal
                tuple(v.type for v in op.results),
                self.microbatching.operands.get(op.id),
                self.microbatching.results.get(op.id),
                op.effects,
                op.scope,
                op.marks,
                regions,
            )
        return known


def first_of_kind(kinds: Sequence[StageKind]) -> tuple[int, ...]:
    """Number of the first stage that is isomorphic to each stage."""
    seen: dict[tuple[object, ...], int] = {}
    return tuple(seen.setdefault(k.key, i) for i, k in enumerate(kinds))
