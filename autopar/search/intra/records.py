"""Records of a choice for the plan: the layouts of each operator, and why each is split as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from autopar.ir import Graph, Literal
from autopar.ir.loops import Scan
from autopar.plan import Choice, OperatorRecord
from autopar.search.intra.attention import AttentionSite
from autopar.search.intra.host import hosted
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.problem import Problem
from autopar.sharding.collective_matmul import Travels


def operator_records(
    problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int], matmuls: Mapping[str, Travels]
) -> tuple[OperatorRecord, ...]:
    """Records of all operators, in their order.

    Args:
        problem: what was planned.
        sharding_problem: its statement on a mesh.
        choice: strategy of each node.
        matmuls: products that run in blocks, by operator, and what of them travels.
    """
    there = hosted(sharding_problem.values, choice)
    there |= _replacing(problem.graph, there)
    cost, records = problem.cost_model, []
    text = lru_cache(maxsize=None)(str)
    for s in sharding_problem.sites:
        strategy = s.strategies[choice[s.node]]
        operands = tuple(
            "" if isinstance(o, Literal) else text(k)
            for o, k in zip(s.op.operands, strategy.operand_layouts, strict=True)
        )
        prefix = s.id.removesuffix(s.op.id)
        on_host = any(sharding_problem.values[prefix + v.name].made_there for v in s.op.results)
        results = tuple(map(text, strategy.result_layouts))
        skips = AttentionSite(cost, sharding_problem.mesh, strategy, s.op, s.types).skips_masked
        record = OperatorRecord(
            s.id, operands, results, on_host=on_host, skips_masked=skips, collective_matmul=matmuls.get(s.id, "")
        )
        records.append((s.time, record))
    for r in sharding_problem.region_sites:
        operands = tuple(
            ""
            if isinstance(o, Literal) and o.type.rank == 0 and not kinds[choice[node]].partial
            else str(kinds[choice[node]])
            for o, (node, kinds) in zip(r.op.operands, r.operands, strict=True)
        )
        results = tuple(str(kinds[choice[node]]) for node, kinds in r.results)
        scan = Scan.of(r.op) if r.op.primitive == "scan" and r.id == r.op.id else None
        first = len(results) if scan is None else scan.num_carry
        host = tuple(n for n, v in enumerate(r.op.results) if n >= first and v.name in there)
        records.append((r.time, OperatorRecord(r.id, operands, results, host_results=host)))
    return tuple(record for _, record in sorted(records, key=lambda e: (e[0], e[1].id)))


def reasons_of(sharding_problem: ShardingProblem, choice: Sequence[int]) -> tuple[Choice, ...]:
    """Cost and the next best choice of each node with an alternative, everything else as it is."""
    costs = [n.costs.copy() for n in sharding_problem.nodes]
    for e in sharding_problem.problem.edges:
        costs[e.source] += e.costs[:, choice[e.target]]
        costs[e.target] += e.costs[choice[e.source], :]
    choices = []
    for n, (node, c) in enumerate(zip(sharding_problem.nodes, costs, strict=True)):
        if node.copy_of:
            continue
        rest = c.copy()
        rest[choice[n]] = np.inf
        best = int(np.argmin(rest))
        second = (float(rest[best]), best) if np.isfinite(rest[best]) else None
        choices.append(
            Choice(
                node.name,
                tuple(node.members),
                node.label(choice[n]),
                float(c[choice[n]]),
                "" if second is None else node.label(second[1]),
                None if second is None else second[0],
            )
        )
    return tuple(choices)


def _replacing(graph: Graph, there: frozenset[str]) -> frozenset[str]:
    """Results of loops that replace inputs ``there``."""
    return frozenset(str(o.operand) for o in graph.outputs if o.updates in there)
