"""Loops over the microbatches of a stage: their bodies, and where a key of the choice problem is in them.

Keys are names with those of the regions around them. Users name scopes as they like, so that a key is looked up by the
names that a body has, and never taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir import Graph, Operator, Value
from autopar.ir.loops import Scan
from autopar.ir.phases import MICROBATCHES, STAGE, is_stage_loop


def loops(graph: Graph) -> list[Operator]:
    """The loops over the microbatches of a stage."""
    return [op for op in graph.operators if is_stage_loop(op)]


def carried(graph: Graph) -> list[Value]:
    """Values that a stage's loops over microbatches carry from one to the next: accumulated gradients, losses.

    New state that an update in the loop writes in place of the old is left out, for it takes no memory of its own.
    """
    return [
        v
        for loop in loops(graph)
        for j, v in enumerate(loop.results[: Scan.of(loop).num_carry])
        if Scan.of(loop).num_consts + j not in state_replaced(loop)
    ]


def state_replaced(op: Operator) -> Mapping[int, int]:
    """State that the loop over microbatches of a stage updates: by operand of the loop that carries it the old state's.

    Empty for other operators.
    """
    if not is_stage_loop(op):
        return {}
    scan = Scan.of(op)
    constants = {i.name: n for n, i in enumerate(scan.body.inputs[: scan.num_consts])}
    ends = (o.updates for o in scan.body.outputs[: scan.num_carry])
    return {n: constants[name] for n, name in enumerate(ends, scan.num_consts) if name in constants}


@dataclass(frozen=True)
class StageLoops:
    """The loops over the microbatches of a stage.

    Args:
        graph: of the stage.
    """

    graph: Graph

    @cached_property
    def bodies(self) -> Mapping[str, Graph]:
        """Bodies by the prefix of keys in them."""
        return {f"{op.id}/body/": op.region("body") for op in loops(self.graph)}

    @cached_property
    def made(self) -> frozenset[str]:
        """Keys of values that operators of bodies make, but for those inside of further loops."""
        return frozenset(p + v.name for p, body in self.bodies.items() for op in body.operators for v in op.results)

    @cached_property
    def directly_in(self) -> frozenset[str]:
        """Keys of what bodies take, and of what their operators make."""
        return self.made.union(p + i.name for p, body in self.bodies.items() for i in body.inputs)

    @cached_property
    def _layers(self) -> tuple[str, ...]:
        """Prefixes of keys in loops inside of a microbatch, as over layers."""
        around = {
            f"{op.id}/body/": op.region("body")
            for op in self.graph.operators
            if {MICROBATCHES, STAGE}.intersection(op.marks)
        }
        bodies = (around or {"": self.graph}).items()
        return tuple(f"{p}{op.id}/body/" for p, body in bodies for op in body.operators if op.primitive == "scan")

    def layers(self, key: str) -> str:
        """Prefix of the loop inside of a microbatch that a key is of something in; "" where there is none."""
        return next((prefix for prefix in self._layers if key.startswith(prefix)), "")

    @cached_property
    def _operators(self) -> frozenset[str]:
        return frozenset(p + op.id for p, body in self.bodies.items() for op in body.operators)

    def holds(self, key: str) -> bool:
        """Whether a key is of something inside of a body."""
        return any(key.startswith(prefix) for prefix in self.bodies)

    def outermost(self, key: str) -> str:
        """The operator of a body that an operator is, or is inside of; "" of what is in no body."""
        if key in self._operators:
            return key
        end = key.find("/")
        while end >= 0:
            if key[:end] in self._operators:
                return key[:end]
            end = key.find("/", end + 1)
        return ""
