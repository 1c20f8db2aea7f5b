"""Elementwise results that are written to memory in any plan, because several kernels take them.

Compilers compute a cheap value again in every kernel that reads it where that reads about as little as the value
itself has (`autopar.search.intra.fusion.is_recomputed`); of others they write the result, unless one elementwise
operator alone reads it. Of which values in memory it is computed depends on the plan: recomputation and stages change
who reads what. Sure is a floor of their bytes,

    floor(v) = sum over its different operands of floor(o)    of an elementwise v that one such operator alone reads
    floor(v) = min(bytes of v, that sum)                      of another elementwise v
    floor(v) = bytes of v                                     of what has a kernel of its own

and sure are those readers that are of one pass with it: in the forward pass those that its results need, for what
only the backward pass takes may be recomputed there. A value of the first line may be in memory in some plan, as it is
held for the backward pass or sent to a stage. Then it is written instead of the one that it is for alone, which is no
larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from autopar.cost import CostModel
from autopar.ir import Graph, Operator
from autopar.ir.analysis import live, names_made
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator
from autopar.search.intra.fusion import growth_of, is_recomputed


def floors(
    operators: Sequence[Operator], inputs: Mapping[str, float], passed_on: Collection[str] = ()
) -> dict[str, float]:
    """Least bytes of the stored values from which each value is computed, itself where it is stored.

    What loops return of each trip may be computed again in the body of another loop, and has its floor there.

    Args:
        operators: of one graph, in running order.
        inputs: floors of its inputs.
        passed_on: see `passed_on`.
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
