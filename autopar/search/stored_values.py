"""Values that are in memory in any plan, whatever is fused, recomputed and cut into stages.

`Values` has facts about the values of one graph. Elementwise results are written to memory in any plan where several
kernels take them: compilers compute a cheap value again in every kernel that reads it where that reads about as little
as the value itself has (`autopar.search.intra.fusion.is_recomputed`); of others they write the result, unless one
elementwise operator alone reads it. Of which values in memory it is computed depends on the plan: recomputation and
stages change who reads what. Sure is a floor of their bytes,

    floor(v) = sum over its different operands of floor(o)    of an elementwise v that one such operator alone reads
    floor(v) = min(bytes of v, that sum)                      of another elementwise v
    floor(v) = bytes of v                                     of what has a kernel of its own

and sure are those readers that are of one pass with it: in the forward pass those that its results need, for what
only the backward pass takes may be recomputed there. A value of the first line may be in memory in some plan, as it is
held for the backward pass or sent to a stage. Then it is written instead of the one that it is for alone, which is no
larger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from autopar.cost import CostModel
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.analysis import live, names_made
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator
from autopar.search.intra.fusion import CONSTANT_BYTES, growth_of, is_recomputed

#: How far back a kernel's operands are followed through elementwise operators.
_MOST_DEPTH = 64


class Values:
    """Facts about the values of one graph, whatever is fused.

    A kernel reads what it is computed from as far back as that lies in memory. Which values do is not known: they are a
    cut between the kernel and what lies in memory in any case, so their bytes are at least what flows between the two
    where each value lets through its bytes (the weak direction of max-flow min-cut). What is for one elementwise
    operator alone lets through any number: where it is in memory another kernel has read for it.

    Args:
        inputs: types of the inputs that lie in memory.
        single: values that one elementwise operator alone reads.
    """

    def __init__(self, inputs: Mapping[str, TensorType], single: Collection[str] = ()) -> None:
        self.single = single
        self.solid = {n for n, type in inputs.items() if type.nbytes > CONSTANT_BYTES}
        self.in_memory = set(inputs)
        self.types = dict(inputs)
        self.makers: dict[str, Operator] = {}
        self.written: dict[str, str] = {}

    def depends(self, op: Operator) -> bool:
        """Whether more than constants decides the results of an operator."""
        return not self.solid.isdisjoint(op.reads)

    def note(self, op: Operator, *, spared: bool, written_in: str = "") -> None:
        """Notes the results of an operator.

        Args:
            op: the operator.
            spared: whether its results may never be stored, nor made.
            written_in: of an elementwise one the phase whose operators read them from memory in any plan, or "".
        """
        if spared or is_generator(op):
            return
        if self.depends(op) or not is_fusible(op):
            self.solid |= {v.name for v in op.results if v.type.nbytes > CONSTANT_BYTES}
        for v in op.results:
            self.types[v.name] = v.type
            if not is_fusible(op):
                self.in_memory.add(v.name)
                continue
            self.makers[v.name] = op
            if written_in:
                self.written[v.name] = written_in

    def in_memory_for(self, name: str, phase: str) -> bool:
        """Whether a value, or what is for it alone, lies in memory for operators of a phase."""
        return name in self.in_memory or self.written.get(name) == phase

    def read_bytes(self, op: Operator, types: Sequence[TensorType], phase: str) -> float:
        """Bytes that a kernel reads at least that ends in an operator.

        Args:
            op: the operator.
            types: of its operands. Of what is sliced no more is read than is taken.
            phase: of the operator.
        """
        most = max((t.size for t in (*types, *(v.type for v in op.results))), default=0)
        enough = sum(self._passes(o, most) for o in dict.fromkeys(op.reads))
        flow = 0.0
        for backwards in (False, True):  # one order finds a way that the other has closed
            if flow < enough:
                flow = max(flow, self._flow(op, most, phase, -1 if backwards else 1))
        return flow

    def _passes(self, name: str, most: int) -> float:
        """Bytes that a value lets through."""
        type = self.types.get(name)
        if type is None or name in self.single:
            return 0.0 if type is None else math.inf
        return min(type.size, most) * type.nbytes / max(1, type.size)

    def _flow(self, op: Operator, most: int, phase: str, order: int) -> float:
        """Bytes that flow to an operator, its operands and theirs taken in one order, or (-1) the other."""
        left: dict[str, float] = {}

        def flow(name: str, wanted: float, depth: int) -> float:
            if name not in left:
                left[name] = self._passes(name, most)
            wanted = min(wanted, left[name])
            there = self.in_memory_for(name, phase)
            sent, maker = wanted if there else 0.0, self.makers.get(name)
            if maker is not None and not there and depth < _MOST_DEPTH:
                for o in tuple(dict.fromkeys(maker.reads))[::order]:
                    if sent < wanted:
                        sent += flow(o, wanted - sent, depth + 1)
            left[name] = left[name] - sent if sent else 0.0
            return sent

        return sum(flow(o, math.inf, 0) for o in tuple(dict.fromkeys(op.reads))[::order])


class StateReads:
    """Inputs of a step that elementwise operators make others of the same size of; each is read once at least.

    Args:
        inputs: types by name; none of bodies.
    """

    def __init__(self, inputs: dict[str, TensorType]) -> None:
        self.inputs = inputs
        self.reached: dict[str, frozenset[str]] = {
            name: frozenset({name}) for name, type in inputs.items() if type.nbytes > CONSTANT_BYTES
        }
        self.counted: set[str] = set()

    def note(self, op: Operator, types: Sequence[TensorType]) -> None:
        """Notes which inputs the results of an operator are computed from, element by element."""
        if not is_fusible(op):
            return
        size = max((v.type.size for v in op.results), default=0)
        from_: set[str] = set()
        for o, t in zip(op.operands, types, strict=True):
            if isinstance(o, str) and t.size == size:
                from_ |= self.reached.get(o, frozenset())
        for v in op.results:
            if v.type.size == size and from_:
                self.reached[v.name] = frozenset(from_)

    def bytes_for(self, op: Operator) -> float:
        """Bytes of the inputs that a returned operator needs and no other has counted."""
        needed = {n for v in op.results for n in self.reached.get(v.name, frozenset())} - self.counted
        self.counted |= needed
        return float(sum(self.inputs[n].nbytes for n in needed))


def floors(
    operators: Sequence[Operator], inputs: Mapping[str, float], passed_on: Collection[str] = ()
) -> dict[str, float]:
    """Least bytes of the stored values from which each value is computed, itself where it is stored.

    What loops return of each trip may be computed again in the body of another loop, and has its floor there.

    Args:
        operators: of one graph, in running order.
        inputs: floors of its inputs.
        passed_on: elementwise results that are never stored, for one elementwise operator alone reads them.
    """
    floor = dict(inputs)
    for op in operators:
        if op.primitive == "scan" and op.regions:
            floor |= _floors_of_results(op, floor)
            continue
        least = sum(floor.get(o, 0.0) for o in dict.fromkeys(op.reads))
        for v in op.results:
            if is_generator(op):
                floor[v.name] = 0.0
            elif is_fusible(op) or op.primitive in ALIASES:
                floor[v.name] = least if v.name in passed_on else min(v.type.nbytes, least)
            else:
                floor[v.name] = v.type.nbytes
    return floor


def floors_of_inputs(loop: Operator, floor: Mapping[str, float]) -> dict[str, float]:
    """The floors of what the body of a loop takes.

    Args:
        loop: a scan.
        floor: of the values around it.
    """
    scan, floors_inside = Scan.of(loop), dict[str, float]()
    first_slice = scan.num_consts + scan.num_carry
    for n, (i, o) in enumerate(zip(scan.body.inputs, loop.operands, strict=True)):
        around = floor.get(o, 0.0) if isinstance(o, str) else 0.0
        if scan.num_consts <= n < first_slice:  # carried on from trip to trip
            floors_inside[i.name] = i.type.nbytes
        else:
            floors_inside[i.name] = min(i.type.nbytes, around / (scan.length if n >= first_slice else 1))
    return floors_inside


def _floors_of_results(loop: Operator, floor: Mapping[str, float]) -> dict[str, float]:
    scan = Scan.of(loop)
    inside = floors(scan.body.operators, floors_of_inputs(loop, floor))
    results: dict[str, float] = {}
    for n, (v, out) in enumerate(zip(loop.results, scan.body.outputs, strict=True)):
        least = inside.get(out.operand, 0.0) if isinstance(out.operand, str) else 0.0
        results[v.name] = v.type.nbytes if n < scan.num_carry else scan.length * least
    return results


def passed_on(graph: Graph, needed: Sequence[Operator]) -> set[str]:
    """Elementwise results that one elementwise operator alone reads, once, to make something that is no larger.

    Args:
        graph: the step or a body.
        needed: its operators that something needs.
    """
    kept = {o.operand for o in graph.outputs} | {o for op in needed if not is_fusible(op) for o in op.reads}
    takes = Counter(o for op in needed for o in op.operands if isinstance(o, str))
    makes = {o: sum(v.type.nbytes for v in op.results) for op in needed for o in op.reads}
    cheap = (op for op in needed if is_fusible(op) and not is_generator(op) and len(op.results) == 1)
    results = (v for op in cheap for v in op.results if takes[v.name] == 1 and v.name not in kept)
    return {v.name for v in results if v.type.nbytes >= makes[v.name]}


def shared_results(
    graph: Graph,
    floor: Mapping[str, float],
    cost: CostModel,
    spared: Collection[str],
    enclosing: str,
    split: Collection[str] | None,
) -> dict[str, str]:
    """Elementwise results of the forward and the backward pass that any plan writes, or what is for them alone.

    Args:
        graph: the step or a body.
        floor: from `floors`.
        cost: says what compilers fuse.
        spared: ids of operators that may be spared.
        enclosing: phase of the operator whose body the graph is; that of the update for the step.
        split: ids of operators that stages never repeat; None where that holds for all.
    """
    if cost.fuses_products:  # several readers may be one kernel
        return {}
    needed = live(graph.operators, [o.operand for o in graph.outputs])
    phases = {op.id: phase_of(op, enclosing) for op in needed}
    passes = {p: [op for op in needed if phases[op.id] == p and op.id not in spared] for p in ("forward", "backward")}
    results = set(names_made(passes["forward"]))
    passes["forward"] = live(passes["forward"], [o.operand for o in graph.outputs if o.operand in results])
    growth, written = growth_of(cost.cluster), dict[str, str]()
    for phase, operators in passes.items():
        takes: Counter[str] = Counter(o for op in operators for o in op.operands if isinstance(o, str))
        summed = {o for op in operators if not is_fusible(op) for o in op.reads}
        for op in operators:
            if not is_fusible(op) or is_generator(op) or op.primitive in ALIASES:
                continue
            if split is not None and op.id not in split:
                continue
            basis = sum(floor.get(o, 0.0) for o in dict.fromkeys(op.reads))
            if cost.fuses and is_recomputed(op, basis, growth):
                continue
            names = [v.name for v in op.results]
            if any(takes[n] > 1 or n in summed for n in names):
                written.update(dict.fromkeys(names, phase))
    return written
