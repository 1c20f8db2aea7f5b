"""Chooses the schedule of a pipeline.

The dynamic program minimizes sum t_i + (m-1) max t_i, which no schedule changes much, and stages are planned for 1F1B,
which holds least. Then every schedule with one stage a worker is timed with those stages (a table takes milliseconds,
see `autopar.simulate.step_of`), and the fastest that they still fit under is taken. Schedules with two stages on
each worker are regions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost import StartPrices
from autopar.errors import InfeasiblePlanError, ScheduleError
from autopar.ir import Graph
from autopar.ir.analysis import names_made, taken_by
from autopar.plan import PlanContent
from autopar.schedule import Table, get
from autopar.schedule.without_flush.schedules import no_flush_text, updates_stagewise
from autopar.search.outcome import Bounded, TooLarge
from autopar.search.pipeline.memory import worker_bytes
from autopar.search.pipeline.record import pipeline_of
from autopar.search.problem import Problem
from autopar.search.source import Sliced
from autopar.search.trail import Region
from autopar.simulate import is_plain, step_of

#: What closes a schedule, in words.
_TIMED = "timed with the stages that are planned, with the starts of its programs"


def fastest_table(problem: Problem, sliced: Sliced, parts: Sequence[PlanContent], table: Table) -> Table:
    """The schedule in which planned stages are done first, within the memory; ``table`` unless one saves something.

    Args:
        problem: the whole.
        sliced: its stages.
        parts: the plan of each, on its devices.
        table: the schedule that they are planned for.
    """
    least = _seconds(problem, sliced, parts, table)
    if least is None:
        return table
    starts = problem.cost_model.starts
    least_before = with_launches(starts, least, table)
    best, least = table, least_before - problem.policy.effort.least_gain * least
    for name in problem.policy.schedules.one_stage_per_worker:
        try:
            other = get(name).table(table.num_stages, table.num_microbatches)
        except ScheduleError:
            continue
        region = Region.of_stages("pipeline", [table.num_stages], [table.num_microbatches], name)
        if not fits(problem, sliced, parts, other):
            problem.trail.close(region, TooLarge("stages as they are planned, with its microbatches in flight"))
            continue
        seconds = _seconds(problem, sliced, parts, other)
        if seconds is not None:
            problem.trail.close(region, Bounded(_TIMED, with_launches(starts, seconds, other)))
            if with_launches(starts, seconds, other) < least:
                best, least = other, with_launches(starts, seconds, other)
    if best is not table:
        region = Region.of_stages("pipeline", [table.num_stages], [table.num_microbatches], table.name)
        problem.trail.close(region, Bounded(_TIMED, least_before))
    return best


def with_launches(starts: StartPrices, seconds: float, table: Table) -> float:
    """Seconds of a step with what the runtime takes to start the programs of the worker that has the most."""
    return seconds + starts.start_s * max(map(len, table.rows))


def _check_readers(graph: Graph, sliced: Sliced, table: Table) -> None:
    """Refuses cuts with which two stages read state whose update takes gradients."""
    map, inputs = sliced.map, {i.name for i in graph.inputs}
    outside = [op for op in graph.operators if op.id not in map.body]
    for o in graph.outputs:
        if o.updates is None or len(map.inputs.get(o.updates, ())) < 2 or not isinstance(o.operand, str):
            continue
        ops, reads = taken_by(outside, [o.operand])
        computed = names_made(ops)
        taken = next((n for n in (o.operand, *reads) if n not in inputs and n not in computed), None)
        if taken is not None:
            raise InfeasiblePlanError(
                f"stages {', '.join(str(s) for s in map.inputs[o.updates])} read {o.updates}, "
                f"whose update takes {taken}; {no_flush_text(table.name)}",
                cause="two stages have one parameter (tied embeddings)",
                remedy='untie them, or schedule="1f1b", which flushes',
                source=graph.producers[taken].source or None if taken in graph.producers else None,
            )


def check_ends(graph: Graph, sliced: Sliced, table: Table) -> None:
    """Refuses cuts across an update where the schedule has no moment at which all stages are through.

    Raises:
        InfeasiblePlanError: with what a stage's update takes of another stage.
    """
    if not updates_stagewise(table.name):
        return
    _check_readers(graph, sliced, table)
    for part in sliced.parts:
        for r in part.received_late:
            reader = next((op for op in graph.operators if op.id in part.late and r.name in op.reads), None)
            raise InfeasiblePlanError(
                f"the update of stage {part.stage} takes {r.name} of stage {r.source}; {no_flush_text(table.name)}",
                cause="gradients are clipped by their global norm, or two stages have one parameter (tied embeddings)",
                remedy='clip by parameter (optax.clip, clip_by_block_rms), untie, or schedule="1f1b", which flushes',
                source=(reader.source or None) if reader is not None else None,
            )


def fits(problem: Problem, sliced: Sliced, parts: Sequence[PlanContent], table: Table) -> bool:
    """Whether every worker has room for its stages and their microbatches in flight."""
    for worker in range(table.num_workers):
        devices = parts[table.stages_of_worker(worker)[0]].stages[0].devices
        limit = problem.job.memory_limit_bytes or problem.cluster.part(devices[0], len(devices)).memory_bytes
        if worker_bytes(parts, sliced, table, worker) > limit:
            return False
    return True


def _seconds(problem: Problem, sliced: Sliced, parts: Sequence[PlanContent], table: Table) -> float | None:
    """Seconds of a step; None where something waits in host memory, which is planned for one schedule."""
    dataflow, durations = pipeline_of(problem.graph, sliced, parts, table, problem.cost_model)
    return step_of(table, dataflow, durations).seconds if is_plain(dataflow) else None
