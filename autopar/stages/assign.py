"""Every operator of a train step on its stages, given the cuts of the forward pass.

Forward: the operators of a stage's layers. Backward: a backward operator runs where what it differentiates was
computed. Cotangents travel from the last stage to the first; an operator goes to the highest stage, not above those of
the cotangents that it reads, on which everything that it reads of the forward pass is there (a weight or an input of
the batch is on the stages that use it, an activation where it is made and where it is read). Update: where its largest
known operand is; what depends on nothing of one stage (step counts, schedules of the learning rate) and constants run
wherever they are read.

Sums of gradients of one parameter from several stages (tied embeddings) wait for the end of the loop: each stage adds
up its own term, and one exchange a step joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents, places
from autopar.ir.phases import phase_of
from autopar.microbatch import Microbatching, analyze_with_barrier
from autopar.stages.layers import Layers

#: An operator that may run on several stages is repeated there only if it reads no more than this.
REPEATED_BYTES = 1 << 20


@dataclass(frozen=True)
class StageMap:
    """Stages of operators and values.

    Args:
        count: number of stages.
        microbatching: the microbatches, with operators that join stages after the loop.
        body: stages of each operator of the loop; several where it only makes what is the same everywhere.
        update: likewise of the operators after the loop.
        inputs: stages that read each input of the graph.
        backward: ids of operators of the loop that belong to the backward pass.
    """

    count: int
    microbatching: Microbatching
    body: Mapping[str, tuple[int, ...]]
    update: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    backward: frozenset[str]


def assign(
    graph: Graph,
    microbatching: Microbatching,
    layers: Layers,
    ends: Sequence[int],
    *,
    without_flush: bool = False,
    after: Sequence[Sequence[int]] = (),
) -> StageMap:
    """Stages of all operators.

    Args:
        graph: a train step.
        microbatching: its microbatches.
        layers: its layers.
        ends: by stage the number of its first layer that is not in it; the last is the number of layers.
        without_flush: whether gradients are computed on the stages of their parameters, so that updates need nothing
            of other stages after the loop.
        after: by stage the earlier stages that its forward pass waits for; empty where each waits for the one before
            it, and so for all.
    """
    starts = [0, *ends[:-1]]
    reached = _reached(after) if after else tuple(frozenset(range(s + 1)) for s in range(len(ends)))
    forward = {
        id: stage
        for stage, (a, b) in enumerate(zip(starts, ends, strict=True))
        for layer in layers.members[a:b]
        for id in layer
    }

    def loop_stages() -> tuple[dict[str, tuple[int, ...]], set[str], set[str]]:
        body, backward, separate = _loop_stages(graph, microbatching, forward, reached)
        return with_parameters(graph, microbatching, body, backward) if without_flush else body, backward, separate

    body, backward, separate = loop_stages()
    joins = _joins(graph, microbatching, body) | separate
    if joins:
        microbatching = analyze_with_barrier(graph, microbatching.count, joins)
        body, backward, _ = loop_stages()
    body = _spread(graph, microbatching, body, len(ends))
    update = _update_stages(graph, microbatching, body)
    inputs = _input_stages(graph, microbatching, body, update)
    return StageMap(len(ends), microbatching, body, update, inputs, frozenset(backward))


def _reached(after: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    """Each stage of a graph with all stages that its forward pass waits for, which its cotangents go to."""
    reached: list[frozenset[int]] = []
    for s, earlier in enumerate(after):
        reached.append(frozenset({s}.union(*(reached[t] for t in earlier))))
    return tuple(reached)


def _loop_stages(
    graph: Graph, microbatching: Microbatching, forward: Mapping[str, int], reached: Sequence[frozenset[int]]
) -> tuple[dict[str, tuple[int, ...]], set[str], set[str]]:
    """Stage of every operator of the loop that depends on the batch, and the ids of those of the backward pass.

    ``reached`` has by stage itself and all stages that its cotangents may go to. The third are ids of the first
    operators that read cotangents which come to no stage together: terms of a parameter of several branches.
    """
    inside = set(microbatching.body)
    stages: dict[str, tuple[int, ...]] = {}
    available: dict[str, set[int]] = {}
    for op in graph.operators:  # where values of the forward pass are
        if op.id in forward and op.id in inside:
            stages[op.id] = (forward[op.id],)
            for n in op.reads:
                available.setdefault(n, set()).add(forward[op.id])
            for v in op.results:
                available.setdefault(v.name, set()).add(forward[op.id])
    body = [op for op in graph.operators if op.id in inside]
    of_batch = {op.id for op in dependents(body, microbatching.batch)}
    cotangent: dict[str, int] = {}
    backward = {op.id for op in dependents(body, microbatching.met)}
    separate: set[str] = set()
    for op in graph.operators:
        names = op.reads
        if op.id not in inside or op.id in forward or op.id not in of_batch:
            continue  # what is the same in every microbatch runs wherever it is read
        known = [cotangent[n] for n in names if n in cotangent]
        allowed = frozenset.intersection(*(reached[s] for s in known or [len(reached) - 1]))
        held = [available[n] for n in names if n not in cotangent and n in available]
        if not allowed:
            separate.add(op.id)
        stage = _highest(held, allowed or reached[min(known)])
        stages[op.id] = (stage,)
        backward.add(op.id)
        for v in op.results:
            cotangent[v.name] = stage
    return stages, backward, separate


def _highest(held: Iterable[set[int]], allowed: frozenset[int]) -> int:
    """The highest ``allowed`` stage in all of ``held``; where there is none, in as many as can be."""
    sets, highest = list(held), max(allowed)
    common = set.intersection(*sets) if sets else {highest}
    fitting = common & allowed
    if fitting:
        return max(fitting)
    below = min([highest, *(max(s) for s in sets)])
    return max((s for s in allowed if s <= below), default=min(allowed))


def _joins(graph: Graph, microbatching: Microbatching, body: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Operators of the loop that only add up terms of several stages."""
    terms: dict[str, set[int]] = {}
    joins: set[str] = set()
    for op in graph.operators:
        if op.id not in body:
            continue
        results = microbatching.results.get(op.id, ())
        partial = bool(results) and all(k.partial for k in results)
        if microbatching.count == 1:
            partial = op.primitive in ("add_any", "add") and phase_of(op) == "backward"
        names = [n for n in op.reads if n in terms or n not in graph.types]
        op_stages = set(body[op.id])
        stages = set().union(op_stages, *(terms[n] for n in names)) if names else op_stages
        reads_terms = bool(op.reads) and all(n in terms for n in op.reads)
        if partial and reads_terms and len(stages) > 1 and _ends_outside(graph, microbatching, op):
            joins.add(op.id)
        if partial:
            for v in op.results:
                terms[v.name] = stages if reads_terms else op_stages
    return frozenset(joins)


def _ends_outside(graph: Graph, microbatching: Microbatching, op: Operator) -> bool:
    """Whether what ``op`` makes only leaves the loop."""
    inside = set(microbatching.body)
    results = {v.name for v in op.results}
    return not any(o.id in inside and results & set(o.reads) for o in graph.operators)


def _spread(
    graph: Graph, microbatching: Microbatching, body: Mapping[str, tuple[int, ...]], count: int
) -> dict[str, tuple[int, ...]]:
    """Adds the operators that are the same in every microbatch: on all stages that read them."""
    inside = set(microbatching.body)
    loop = [op for op in graph.operators if op.id in inside]
    spread = places(loop, {}, lambda op, wanted: body.get(op.id) or wanted or {count - 1})
    return {op.id: spread[op.id] for op in loop}


def _update_stages(
    graph: Graph, microbatching: Microbatching, body: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Stages of the operators after the loop."""
    stage_of: dict[str, tuple[int, ...]] = {}
    for op in graph.operators:
        if op.id in body:
            stage_of.update((v.name, body[op.id][-1:]) for v in op.results)
    for op in graph.operators:
        if op.id in body:
            for n in op.reads:
                if n not in microbatching.batch and n not in graph.producers:
                    stage_of.setdefault(n, (min(body[op.id]),))
    ids = set(microbatching.after)
    late = [op for op in graph.operators if op.id in ids]
    constants = _constants(late)
    aims = _aims(graph, [op for op in late if op.id not in constants], stage_of)
    stages: dict[str, tuple[int, ...]] = {}
    for op in late:
        if op.id in constants:
            continue
        aimed = [aims[v.name] for v in op.results if v.name in aims]
        known = [n for n in op.reads if n in stage_of]
        if aimed or known:
            largest = max(known, key=lambda n: graph.types[n].nbytes, default="")
            stages[op.id] = aimed[0] if aimed else stage_of[largest][:1]
            stage_of.update((v.name, stages[op.id]) for v in op.results)

    def decide(op: Operator, wanted: set[int]) -> Iterable[int]:
        if op.id in stages:
            return stages[op.id]
        read_bytes = 0 if op.id in constants else sum(graph.types[n].nbytes for n in op.reads)
        several = read_bytes <= REPEATED_BYTES and not op.effects
        return (wanted if several else {min(wanted)}) if wanted else {0}

    spread = places(late, {}, decide)
    return {op.id: spread[op.id] for op in late}


def _constants(operators: Sequence[Operator]) -> set[str]:
    """Ids of operators whose results depend on no input: every stage makes them for itself, and none is sent."""
    constants: set[str] = set()
    ids: set[str] = set()
    for op in operators:
        if not op.effects and not op.regions and all(n in constants for n in op.reads):
            ids.add(op.id)
            constants.update(v.name for v in op.results)
    return ids


def _aims(
    graph: Graph, late: Sequence[Operator], stage_of: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Stage of the new parameter that a value becomes, by operators that keep the shape."""
    aims = {
        o.operand: stage_of[o.updates][:1]
        for o in graph.outputs
        if isinstance(o.operand, str) and o.updates is not None and o.updates in stage_of and o.type.rank
    }
    for op in reversed(late):
        for v in op.results:
            if v.name in aims:
                for n in op.reads:
                    if graph.types[n].shape == v.type.shape:
                        aims.setdefault(n, aims[v.name])
    return aims


def _input_stages(
    graph: Graph,
    microbatching: Microbatching,
    body: Mapping[str, tuple[int, ...]],
    update: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """Stages that read each input, itself or through operators that run before the loop."""
    readers: dict[str, set[int]] = {}
    for op in graph.operators:
        for n in op.reads:
            if op.id in body:
                readers.setdefault(n, set()).update(body[op.id])
            if op.id in update:
                readers.setdefault(n, set()).update(update[op.id])
    before = set(microbatching.before)
    places([op for op in graph.operators if op.id in before], readers, lambda op, wanted: wanted)
    return {i.name: tuple(sorted(readers.get(i.name, set()))) or (0,) for i in graph.inputs}


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
    """Stage of the parameter that each value that leaves the loop updates; of one stage only."""
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
    """First stage that reads each input of a forward pass, itself or through operators before the loop."""
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
