"""Bytes a device of every value at every time, by the choice that decides its layout.

Times are positions in the running order, bodies of loops in place. A value lives from the operator
that makes it to its last reader; a result to the end of the step; an input for the whole step, or to
its last reader where its buffer is donated. What an elementwise operator makes for its only reader,
elementwise too, is never stored: compilers fuse the two, and its operands live as long as that reader. Nor is what
is no smaller than the values that it is computed from, where all its readers are elementwise or sums (on CPU: what is
about twice as large; see `fusion`). While
an operator that is neither runs, each operand is counted once more in the layout that it takes. A
value that is read through a shared copy is given up once the copy is made. Of a stage of a pipeline,
what its microbatches in flight wait with is held all the time, once for each of them. What lies in host memory
between updates is on the device from its first reader to its last, and what replaces it to its own last reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Graph, Layout, TensorType
from autopar.search.intra.host import HOST, host_usage, on_device
from autopar.search.intra.layouts import LayoutTable
from autopar.search.intra.sharding_problem import Array, CopyDraft, UsageDraft, Use, ValueDraft
from autopar.search.intra.stage_loops import StageLoops, carried
from autopar.search.problem import Problem

#: Kind of what microbatches in flight hold besides the one that runs.
IN_FLIGHT = "waiting"

#: Kind of the state of other stages of the same worker.
OTHER_STAGES = "other stages"

#: Kinds of what is there besides the stage that is planned, or in host memory.
BESIDES = (IN_FLIGHT, OTHER_STAGES, HOST)

_ROLE_KINDS = {"parameter": "parameters", "optimizer": "optimizer", "batch": "batch"}


def usages(
    problem: Problem,
    values: Mapping[str, ValueDraft],
    copies: Sequence[CopyDraft],
    layouts: LayoutTable,
    stop: int,
) -> list[UsageDraft]:
    """The lifetime of each value and of each copy, with its bytes a device by strategy, in the order of the values."""
    roles = {i.name: i.role for i in problem.graph.inputs}
    lasting = _lasting(problem.graph) if problem.subproblem.other_stages else frozenset[str]()
    returned = {o.operand for o in problem.graph.outputs}
    loops = StageLoops(problem.graph)
    by_value: dict[str, list[CopyDraft]] = defaultdict(list)
    for c in copies:
        by_value[c.key].append(c)
    replaced = {o.operand: values[o.updates] for o in problem.graph.outputs if o.updates and values[o.updates].hosted}
    usages: list[UsageDraft] = []
    sized, fuses_products = Sizes(layouts), problem.cost_model.fuses_products
    until = _until(values)
    for v in values.values():
        if v.node is None or not v.layouts:
            continue
        if v.wire:
            if v.source:  # the input is there in any case
                usages += _copies(v, by_value[v.key], sized, stop)
            else:
                usages += _made(v, v.key in returned, by_value[v.key], sized, stop, until)
            continue
        if v.alias:  # what it is another name of is counted, but not what readers make of it
            usages += [] if v.hosted else _operands(v, [u for u in v.uses if u.node != v.node and not u.as_made], sized)
            continue
        if problem.subproblem.extra_in_flight and is_in_flight(v, loops):
            each = sized.of(v.type, v.layouts)
            usages.append(UsageDraft(v.node, 0, stop, problem.subproblem.extra_in_flight * each, IN_FLIGHT, v.key))
        if v.key in lasting:
            each = problem.subproblem.other_stages * on_device(v, sized.of(v.type, v.layouts))
            usages.append(UsageDraft(v.node, 0, stop, each, OTHER_STAGES, v.key))
        if v.source:
            usages += _input(v, roles[v.key], v.key in problem.job.donated, by_value[v.key], sized, stop)
            if v.hosted:
                usages.append(host_usage(problem, v, sized.of(v.type, v.layouts), stop))
        elif v.key in replaced:
            usages += _replacing(v, replaced[v.key], by_value[v.key], sized, stop, until)
        else:
            usages += _made(v, v.key in returned, by_value[v.key], sized, stop, until)
            if v.transient and fuses_products:
                usages += _operands(v, [u for u in v.uses if u.node != v.node], sized)
            if v.hosted and not v.made_there:  # what the host makes is there in parts, or replaces what is counted
                usages.append(host_usage(problem, v, sized.of(v.type, v.layouts), stop))
    arrays = {id(u.bytes): u.bytes for u in usages}  # many share one
    some = {identity: bool(bytes.any()) for identity, bytes in arrays.items()}
    return [u for u in usages if u.stop > u.start and some[id(u.bytes)]]


def is_in_flight(v: ValueDraft, loops: StageLoops) -> bool:
    """Whether a microbatch in flight holds the value: made in the forward pass and read in the backward pass of a loop
    over microbatches."""
    if v.key not in loops.made or v.alias or v.phase == "backward":
        return False
    return any(u.phase == "backward" for u in v.uses)


def _lasting(graph: Graph) -> frozenset[str]:
    """Bytes on a worker through the works of its other stages: state, and accumulated values."""
    state = {i.name for i in graph.inputs if i.role in ("parameter", "optimizer")}
    return frozenset(state.union(v.name for v in carried(graph)))


@dataclass
class Sizes:
    """Bytes of pieces on one mesh, remembered by identity of the tuple of layouts (kept alive here)."""

    layouts: LayoutTable
    known: dict[tuple[TensorType, int], tuple[tuple[Layout, ...], Array]] = field(default_factory=dict)
    differing: dict[tuple[int, int], tuple[object, object, NDArray[np.bool_]]] = field(default_factory=dict)

    def of(self, type: TensorType, layouts: tuple[Layout, ...]) -> Array:
        """Bytes of one device's piece in each of ``layouts``."""
        key = (type, id(layouts))
        if key not in self.known:
            self.known[key] = (layouts, self.layouts.local_bytes(type, layouts))
        return self.known[key][1]

    def different(self, stored: tuple[Layout, ...], read: tuple[Layout, ...]) -> NDArray[np.bool_]:
        """Places at which two tuples of layouts differ."""
        key = (id(stored), id(read))
        if key not in self.differing:
            marks = np.array([a != b for a, b in zip(stored, read, strict=True)])
            self.differing[key] = (stored, read, marks)
        return self.differing[key][2]


def _input(
    v: ValueDraft, role: str, donated: bool, copies: Sequence[CopyDraft], sized: Sizes, stop: int
) -> list[UsageDraft]:
    assert v.node is not None
    kind = _ROLE_KINDS.get(role, "temporaries")
    readers = [u for u in v.uses if u.time < stop - 1]
    last = max((u.done for u in readers), default=1)
    bytes = sized.of(v.type, v.layouts)
    usages = [UsageDraft(v.node, 0, last if donated else stop, on_device(v, bytes), kind, v.key)]
    usages += _moved_up(v, readers, bytes, kind)
    return usages + _copies(v, copies, sized, stop)


def _moved_up(v: ValueDraft, readers: Sequence[Use], bytes: Array, kind: str) -> list[UsageDraft]:
    """Usage of a value in host memory, on the device from the first reader there to the last."""
    here = [u for u in readers if not u.there]
    if not v.hosted or not here or v.trips > 1:
        return []
    assert v.node is not None
    first, done = min(u.time for u in here), max(u.done for u in here)
    return [UsageDraft(v.node, first, done, bytes - on_device(v, bytes), kind, v.key)]


def _copies(v: ValueDraft, copies: Sequence[CopyDraft], sized: Sizes, stop: int) -> list[UsageDraft]:
    """Shared copies of an input, where they are laid out otherwise."""
    usages = []
    readers = [u for u in v.uses if u.time < stop - 1]
    for c in copies:
        extra = np.where(sized.different(v.layouts, c.layouts), sized.of(v.sent, c.layouts), 0.0)
        for phase in c.phases:
            taken = [u for u in readers if u.phase == phase or (phase == "" and u.phase != "update")]
            if taken:
                first, last = min(u.time for u in taken), max(u.done for u in taken)
                usages.append(UsageDraft(c.node, first, last, extra, "temporaries", v.key))
    return usages


def _made(
    v: ValueDraft, returned: bool, copies: Sequence[CopyDraft], sized: Sizes, stop: int, until: Mapping[str, int]
) -> list[UsageDraft]:
    assert v.node is not None
    if v.transient and not returned:
        return []
    kind = _kind(v)
    uses = [_sent_down(u, v) if u.there else u for u in v.uses]
    inside = [u for u in uses if u.node == v.node]
    outside = [u for u in uses if u.node != v.node]
    usages: list[UsageDraft] = []
    end = v.time + 1
    copied = {phase for c in copies for phase in c.phases}
    for c in copies:
        readers = [u for u in outside if c.phases in (("",), (u.phase,))]
        first, last = min(u.time for u in readers), max(_end(u, until) for u in readers)
        usages.append(UsageDraft(c.node, first, last, sized.of(v.sent, c.layouts), kind, v.key))
        end = max(end, first)
    # Who takes the value itself; what else reads it, be it the result of the step, takes a copy.
    direct = [*inside, *(u for u in outside if not copied.intersection(("", u.phase)))]
    end = max([end, *(_end(u, until) for u in direct)])
    last = stop if returned and (not copies or any(u.time >= stop - 1 for u in direct)) else end
    passes_on = returned or any(u.phase != v.phase for u in v.uses)  # perhaps to another program
    stored = v.kept if passes_on or v.widened else v.sent
    usages.append(UsageDraft(v.node, v.time, last, on_device(v, sized.of(stored, v.layouts)), kind, v.key))
    if v.made_there:
        usages += _moved_up(v, [u for u in v.uses if u.time < stop - 1], sized.of(v.type, v.layouts), kind)
    return usages + ([] if v.trips > 1 else _operands(v, outside, sized))


def _replacing(
    v: ValueDraft,
    target: ValueDraft,
    copies: Sequence[CopyDraft],
    sized: Sizes,
    stop: int,
    until: Mapping[str, int],
) -> list[UsageDraft]:
    """Usages of the value that replaces ``target``, which may lie in host memory: after its last reader it is there."""
    assert target.node is not None
    if target.trips > 1 or v.made_there:  # a loop, or the host, makes it where it stays
        bytes = on_device(target, sized.of(target.type, target.layouts))
        return [UsageDraft(target.node, v.time, stop, bytes, _kind(v), v.key)]
    usages = _made(replace(v, uses=[u for u in v.uses if u.time < stop - 1]), False, copies, sized, stop, until)
    end = max(u.stop for u in usages)
    rest = on_device(target, sized.of(target.type, target.layouts))
    return [*usages, UsageDraft(target.node, end, stop, rest, _kind(v), v.key)]


def _operands(v: ValueDraft, readers: Sequence[Use], sized: Sizes) -> list[UsageDraft]:
    """Operands of heavy operators, in the layout that they take them in, while they run.

    A loop holds a stack that it reads until it ends: saved inputs of layers are activations there too.
    """
    kind = _kind(v)
    return [
        UsageDraft(
            u.node,
            u.time,
            u.done,
            sized.of(v.sent, u.required),
            kind if u.done > u.time + 1 else "temporaries",
            v.key,
        )
        for u in readers
        if u.heavy
    ]


def _sent_down(use: Use, v: ValueDraft) -> Use:
    """A use on the host, as the device has it: the value leaves as soon as it is made."""
    return replace(use, time=v.time + 1, until=0, consumer="")


def _end(use: Use, until: Mapping[str, int]) -> int:
    """Time from which a reader needs the value no more: before it runs if it takes a piece, counted apart."""
    return max(use.time + (0 if use.heavy else 1), until.get(use.consumer, 0))


def _until(values: Mapping[str, ValueDraft]) -> dict[str, int]:
    """Time at which the last reader of a result that is never stored is done, by operator.

    It is recomputed where it is read, so that its operands have to be there.
    """
    by_time = sorted((v for v in values.values() if v.transient), key=lambda v: -v.time)
    ends: dict[str, int] = {}
    for v in by_time:
        uses = [_sent_down(u, v) if u.there else u for u in v.uses]
        ends[v.key] = max((max(u.time + 1, ends.get(u.consumer, 0)) for u in uses), default=0)
    return ends


def _kind(v: ValueDraft) -> str:
    phases = {u.phase for u in v.uses}
    if v.phase == "forward" and "backward" in phases:
        return "activations"
    if v.phase == "backward" and "update" in phases:
        return "gradients"
    return "temporaries"
