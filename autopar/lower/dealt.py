"""Independent factorizations of many matrices are dealt out to the devices: they become factorizations of stacks.

Optimizers such as Shampoo and SOAP factorize a matrix or two of each parameter. One matrix runs whole wherever it is
read, but the stack of several has a dim that can be split. Matrices of one size of which none depends on another are
stacked; as many more as make the stack divide are identities.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator
from autopar.ir.primitives import FACTORIZATIONS
from autopar.lower.localize.base import bind
from autopar.lower.microbatch.parts import Recorder, run_whole
from autopar.lower.microbatch.retrace import retraced

# Matrices with a smaller side are not worth the copies.
_LEAST_SIDE = 32
_DEALT = FACTORIZATIONS - {"fft", "triangular_solve"}


def dealt(traced: Traced, num_devices: int) -> Traced:
    """``traced`` with independent factorizations of matrices of one size as one of a stack.

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
    """Factorizations that are equal, none of which depends on another of any group of the same depth."""
    depth: dict[str, int] = defaultdict(int)
    by_level: dict[tuple[Any, ...], list[Operator]] = defaultdict(list)
    for op in graph.operators:
        level = max((depth[o] for o in op.reads), default=0)
        if op.primitive in _DEALT and not op.effects:
            types = graph.operand_types(op)
            if len(types) == 1 and types[0].rank == 2 and min(types[0].shape) >= _LEAST_SIDE:
                by_level[level, op.primitive, op.attrs, types[0]].append(op)
            level += 1
        depth.update((v.name, level) for v in op.results)
    return [tuple(group) for group in by_level.values() if len(group) > 1]


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
    """Every value of a program, its factorizations as soon as all matrices of their stack are there."""
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
    """What the factorizations of a group return, computed as one of a stack."""
    first, bound = group[0], program.bounds[group[0].id]
    with recorder.around(first):
        matrices = [env[o] for op in group for o in op.operands if not isinstance(o, Literal)]
        more = _in_stacks(len(matrices), num_devices) - len(matrices)
        rows, columns = matrices[0].shape
        identity = jnp.eye(rows, columns, dtype=matrices[0].dtype)
        results = bind(bound.primitive, bound.params, [jnp.stack([*matrices, *[identity] * more])])
        return {
            v.name: outputs[n] for n, op in enumerate(group) for v, outputs in zip(op.results, results, strict=True)
        }
