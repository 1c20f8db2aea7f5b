"""Gradients on the stages of their parameters, as updates without a flush need them.

A cut may separate a parameter from what its gradient is computed of: the sum of cotangents that is the gradient of a
bias runs where the cotangents are made, which is the stage behind the cut if their operator is there. With a flush one
exchange a step mends that. Without one every update needs its gradients on its stage: the last operator of each
gradient is put there, and what it reads is sent by the backward pass of the higher stage, which runs first.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from autopar.ir import Graph, Operator
from autopar.ir.analysis import places
from autopar.microbatch import Microbatching

_Stages = Mapping[str, tuple[int, ...]]


def with_parameters(
    graph: Graph, microbatching: Microbatching, body: _Stages, backward: Set[str]
) -> dict[str, tuple[int, ...]]:
    """Stages of the operators of the loop, with each gradient on the stage of its parameter where that can be.

    Args:
        graph: a train step.
        microbatching: its microbatches.
        body: stages of the operators of the loop.
        backward: ids of those of the backward pass.
    """
    return _Moves(graph, microbatching, dict(body), backward, _targets(graph, microbatching, body, backward)).moved()


def _targets(graph: Graph, microbatching: Microbatching, body: _Stages, backward: Set[str]) -> dict[str, int]:
    """By value that leaves the loop the stage of the parameter that it updates; of one stage only."""
    owners = _parameter_stages(graph, microbatching, body, backward)
    reached: dict[str, set[int]] = {}
    for o in graph.outputs:
        if isinstance(o.operand, str) and o.updates in owners:
            reached.setdefault(o.operand, set()).add(owners[o.updates])
    late = set(microbatching.after)
    for op in reversed(graph.operators):
        if op.id in late:
            stages = set().union(*(reached.get(v.name, set()) for v in op.results))
            for n in op.reads if stages else ():
                reached.setdefault(n, set()).update(stages)
    joined = [j.name for j in microbatching.joined]
    return {n: next(iter(reached[n])) for n in joined if len(reached.get(n, ())) == 1}


def _parameter_stages(graph: Graph, microbatching: Microbatching, body: _Stages, backward: Set[str]) -> dict[str, int]:
    """By input that a forward pass reads, itself or through operators before the loop, the first stage that does."""
    readers: dict[str, set[int]] = {}
    for op in graph.operators:
        if op.id in body and op.id not in backward:
            for n in op.reads:
                readers.setdefault(n, set()).update(body[op.id])
    before = set(microbatching.before)
    places([op for op in graph.operators if op.id in before], readers, lambda op, wanted: wanted)
    return {
        i.name: min(readers[i.name]) for i in graph.inputs if readers.get(i.name) and i.name not in microbatching.batch
    }


@dataclass
class _Moves:
    """Operators of the backward pass on lower stages, last ones first."""

    graph: Graph
    microbatching: Microbatching
    stages: dict[str, tuple[int, ...]]
    backward: Set[str]
    targets: Mapping[str, int]
    readers: dict[str, list[str]] = field(default_factory=dict)
    there: dict[str, set[int]] = field(default_factory=dict)
    split: set[str] = field(default_factory=set)
    put_lower: set[str] = field(default_factory=set)

    def moved(self) -> dict[str, tuple[int, ...]]:
        """The stages."""
        self.split.update(self.microbatching.batch)
        for op in self.graph.operators:
            if op.id in self.stages:
                states = self.microbatching.results.get(op.id, ())
                self.split.update(v.name for v, k in zip(op.results, states, strict=False) if any(k.dims))
                for v in op.results:
                    self.there.setdefault(v.name, set()).update(self.stages[op.id])
                for n in op.reads:
                    self.readers.setdefault(n, []).append(op.id)
                    self.there.setdefault(n, set()).update(self.stages[op.id])
        for op in reversed(self.graph.operators):
            if op.id in self.backward and len(self.stages[op.id]) == 1:
                self._move(op)
        return self.stages

    def _move(self, op: Operator) -> None:
        (stage,) = self.stages[op.id]
        joined = {j.name for j in self.microbatching.joined}
        leaving = [v.name for v in op.results if v.name in joined]
        readers = [id for v in op.results for id in self.readers.get(v.name, ())]
        wanted = {self.targets.get(n, stage) for n in leaving} | {s for id in readers for s in self.stages[id]}
        target = max(wanted, default=stage)
        if target >= stage:
            return
        states = self.microbatching.results.get(op.id, ())
        term = bool(states) and all(k.partial for k in states)
        smaller = self._sent_bytes(op, target) <= sum(self._bytes(v.name) for v in op.results)
        if leaving or (self.put_lower.issuperset(readers) and (term or smaller)):
            self.stages[op.id] = (target,)
            self.put_lower.add(op.id)
            for n in (*op.reads, *(v.name for v in op.results)):
                self.there.setdefault(n, set()).add(target)

    def _sent_bytes(self, op: Operator, stage: int) -> float:
        """Bytes of a microbatch that ``op`` would need sent to a stage."""
        return sum(self._bytes(n) for n in dict.fromkeys(op.reads) if self._is_sent(n, stage))

    def _is_sent(self, name: str, stage: int) -> bool:
        maker = self.graph.producers.get(name)
        return maker is not None and maker.id in self.stages and stage not in self.there.get(name, set())

    def _bytes(self, name: str) -> float:
        return self.graph.types[name].nbytes / (self.microbatching.count if name in self.split else 1)
