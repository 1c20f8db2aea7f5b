"""The key of a plan: a hash of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from autopar.errors import ScheduleError
from autopar.ir import Graph, Operator
from autopar.ir.text import graph_text
from autopar.schedule.registry import registered_schedules
from autopar.search.constraints import shards_of
from autopar.search.plain_data import NotPlainError, plain_data
from autopar.search.problem import Problem
from autopar.search.problem_data import Conditions, class_name
from autopar.sharding import rule_for
from autopar.sharding.registry import registered_rules


def key_of(problem: Problem, planner: Any, environment_hash: str | None) -> str | None:
    """The key of the plan that a planner makes of a problem; None where such plans are not to be kept.

    Two problems have one key only if their plans are equal to the byte: it is a hash of the whole graph (names, roles,
    scopes and updates too; lines of the source only where the plan tells them), the cluster, the cost model, every
    option and threshold, jax's settings, and the environment_hash. Not kept are plans

    - of searches that are watched by `Reporting.progress`, which would have nothing to say,
    - where a user registered a sharding rule or a schedule, or gave a strategy, schedule, cost model or source that is
      not autopar's own: what these do is not known,
    - of graphs that were traced under settings without a text that is the same in every process.

    Args:
        problem: what is planned.
        planner: the strategy, with what is planned by it besides, as plain data; see `plain_data`.
        environment_hash: see `autopar.search.plain_data.environment_hash`; with None no plan is kept.

    Returns:
        SHA-256, 64 hexadecimal digits.
    """
    if (
        environment_hash is None
        or problem.settings is None
        or problem.reporting.progress is not None
        or registered_rules()
        or registered_schedules()
    ):
        return None
    try:
        data = {
            "planner": plain_data(planner),
            **Conditions.of(problem).data(),
            "source": None if problem.source is None else class_name(problem.source),
            "settings": problem.settings,
            "environment": environment_hash,
        }
    except (NotPlainError, ScheduleError):
        return None
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode())
    digest.update(graph_text(without_lines(problem.graph)).encode())
    return digest.hexdigest()


def without_lines(graph: Graph) -> Graph:
    """The graph without the lines of its source, but for those that a plan's notes tell."""
    return replace(graph, operators=tuple(_without_line(graph, op) for op in graph.operators))


def _without_line(graph: Graph, op: Operator) -> Operator:
    regions = tuple((name, without_lines(region)) for name, region in op.regions)
    # Of operators that have no rule, call Python or say where a value lies there is a note with the line.
    _, known = rule_for(op, graph.operand_types(op))
    keeps_line = not known or shards_of(op) is not None or op.primitive.endswith("_callback")
    return replace(op, regions=regions, source=op.source if keeps_line else "")
