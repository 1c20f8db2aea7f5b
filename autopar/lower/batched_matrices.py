"""Independent work on many matrices is dealt out to the devices: it becomes work on stacks of them.

Optimizers such as Shampoo and SOAP factorize a matrix or two of each parameter, Muon multiplies each one with itself in
a loop. One matrix runs whole wherever it is read, or sends at each product, but the stack of several has a dim that can
be split. Matrices of one size of which none depends on another are stacked; as many more as make the stack divide
repeat the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar._compat.primitives import bind
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator, TensorType
from autopar.ir.fingerprint import fingerprint
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import FACTORIZATIONS
from autopar.lower.localize.base import scalar
from autopar.lower.retrace import Recorder, retraced, run_whole

# Matrices with a smaller side are not worth the copies.
_LEAST_SIDE = 32
_BATCHED = FACTORIZATIONS - {"fft", "triangular_solve"}


def with_batched_matrices(traced: Traced, num_devices: int) -> Traced:
    """``traced`` with independent factorizations, and loops of products, of matrices of one size as one of a stack.

    Args:
        traced: a step.
        num_devices: that the stacks may be split over.
    """
    groups = _groups(traced.graph) if num_devices > 1 else []
    if not groups:
        return traced

    def run(env: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        return _run(traced.program, groups, num_devices, env, recorder)

    return retraced(traced, run)


def _groups(graph: Graph) -> list[tuple[Operator, ...]]:
    """Operators that are equal, none of which depends on another of any group of the same depth."""
    depth: dict[str, int] = defaultdict(int)
    by_level: dict[tuple[Any, ...], list[Operator]] = defaultdict(list)
    for op in graph.operators:
        level = max((depth[o] for o in op.reads), default=0)
        types = graph.operand_types(op)
        if op.primitive in _BATCHED and not op.effects:
            if len(types) == 1 and types[0].rank == 2 and min(types[0].shape) >= _LEAST_SIDE:
                by_level[level, op.primitive, op.attrs, types[0]].append(op)
            level += 1
        elif op.primitive == "scan" and _multiplies_matrices(op, types):
            by_level[level, op.attrs, tuple(types), _literals(op), _regions(op)].append(op)
            level += 1
        depth.update((v.name, level) for v in op.results)
    return [tuple(group) for group in by_level.values() if len(group) > 1]


def _multiplies_matrices(op: Operator, types: Sequence[TensorType]) -> bool:
    """Whether a loop of an update does nothing but turn one matrix into another, by products."""
    loop = Scan.of(op)
    carried = [t for t in types[loop.num_consts : loop.num_whole] if t.rank]
    return (
        phase_of(op) == "update"
        and not op.effects
        and len(op.results) == loop.num_carry
        and [_is_matrix(t) for t in carried] == [True]
        and any(inner.primitive == "dot_general" for _, body in op.regions for inner in body.operators)
        and not any(inner.primitive == "constant" for _, body in op.regions for inner in body.operators)
    )


def _matrices(op: Operator) -> range:
    """Operands that are stacked though they may be one array: a factorized one, or one that a loop carries."""
    if op.primitive != "scan":
        return range(len(op.operands))
    loop = Scan.of(op)
    return range(loop.num_consts, loop.num_whole)


def _is_matrix(type: TensorType) -> bool:
    """Whether an array is one matrix, which may have dims of size 1 in front, and is worth the copies."""
    return type.rank > 1 and min(type.shape[-2:]) >= _LEAST_SIDE and type.size == type.shape[-2] * type.shape[-1]


def _literals(op: Operator) -> tuple[str, ...]:
    return tuple(o.text if isinstance(o, Literal) else "" for o in op.operands)


def _regions(op: Operator) -> tuple[str, ...]:
    return tuple(fingerprint(body) for _, body in op.regions)


def _in_stacks(count: int, num_devices: int) -> int:
    """Matrices of a stack of at least ``count``: a divisor of the devices, or a multiple of them."""
    if count >= num_devices:
        return -(-count // num_devices) * num_devices
    return next(n for n in range(count, num_devices + 1) if num_devices % n == 0)


def _run(
    program: BoundGraph,
    groups: Sequence[Sequence[Operator]],
    num_devices: int,
    env: dict[str, Any],
    recorder: Recorder,
) -> dict[str, Any]:
    """Every value of a program, what is dealt out as soon as all matrices of its stack are there."""
    graph = program.graph
    group_of = {op.id: group for group in groups for op in group}
    left = list(graph.operators)
    while left:
        later, moved = [], False
        for op in left:
            group = group_of.get(op.id)
            if op.results and op.results[0].name in env:
                continue
            needed = op.reads if group is None else [o for member in group for o in member.reads]
            if any(o not in env for o in needed):
                later.append(op)
                continue
            moved = True
            if group is None:
                part = Graph(graph.name, (), (op,), ())
                env = run_whole(BoundGraph(part, program.bounds, program.constants), env, recorder)
            else:
                env.update(_stacked(program, group, num_devices, env, recorder))
        assert moved, "groups are of one depth, so that some operator can run"
        left = later
    return env


def _stacked(
    program: BoundGraph, group: Sequence[Operator], num_devices: int, env: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any]:
    """Results of a group's operators, computed as one of stacks of the operands in which they differ."""
    first, bound = group[0], program.bounds[group[0].id]
    more = _in_stacks(len(group), num_devices) - len(group)
    operands, stacked = list[Any](), list[bool]()
    matrices = _matrices(first)
    with recorder.around(first):
        for n, each in enumerate(zip(*(op.operands for op in group), strict=True)):
            arrays = [scalar(o) if isinstance(o, Literal) else env[o] for o in each]
            stacked.append(n in matrices or len(set(map(str, each))) > 1)
            operands.append(jnp.stack([*arrays, *arrays[:1] * more]) if stacked[-1] else arrays[0])
        if first.primitive == "scan":
            axes = [0 if s else None for s in stacked]
            run: Any = jax.vmap(lambda *o: bind(bound.primitive, bound.params, [*o]), axes)
            results = run(*operands)
        else:
            results = bind(bound.primitive, bound.params, operands)
        return {
            v.name: outputs[n] for n, op in enumerate(group) for v, outputs in zip(op.results, results, strict=True)
        }
