"""AMPNet on workers: each takes what has arrived, and the driver keeps the order that happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.lower.pipeline.ampnet import AmpPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.amp_worker import KINDS, LETTERS, check_workers
from autopar.runtime.ordered import OrderedCalls, check_order
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.program import RemoteProgram, deployment_of, load_program
from autopar.runtime.ray.source import Pipelined, Result, placement_text, places_of_inputs
from autopar.runtime.without_flush import outputs_of_updates
from autopar.schedule import Apply, Instruction, Program, Run, Table, Task


@dataclass(frozen=True, eq=False)
class RemoteAmpProgram(RemoteProgram, OrderedCalls):
    """AMPNet whose workers are ready; see `autopar.runtime.loaded.LoadedProgram`."""

    @property
    def orders(self) -> Sequence[Table]:
        """The order of the last call; nothing before the first."""
        orders, table = self.runtime.orders, self.runtime.source.program.table
        if not any(orders):
            return ()
        rows = tuple(_row(stage, order) for stage, order in enumerate(orders))
        return (Table(table.name, table.num_stages, table.num_microbatches, rows),)

    def replay(self, placed: Sequence[Any], order: Table) -> Sequence[Any]:
        """See `OrderedCalls.replay`."""
        table = self.runtime.source.program.table
        check_order(order, table.num_stages, table.num_microbatches)
        orders = tuple("".join(LETTERS[task.kind] for task in row) for row in order.rows)
        return self.joined(self.runtime.step(self.inputs(placed), orders=orders))


def _row(stage: int, order: str) -> tuple[Task, ...]:
    count = dict.fromkeys(KINDS, 0)
    row = []
    for letter in order:
        row.append(Task(KINDS[letter], stage, count[letter]))
        count[letter] += 1
    return tuple(row)


def amp_source(split_step: SplitStep, amp: AmpPipeline) -> Pipelined:
    """AMPNet as a step of workers.

    Args:
        split_step: the step as it was lowered.
        amp: its programs and what they carry out.

    Raises:
        ScheduleError: stages on workers of their own could not carry it out, see `check_workers`.
    """
    check_workers(amp.flow)
    lowered, flow, graph = amp.pipeline, amp.flow, split_step.step.graph
    axes = tuple(lowered.mesh_axes(s) for s in range(lowered.plan.num_stages))
    # The lists say who sends to whom; what they give up, a pass in another order may still read.
    workers = tuple(
        msgspec.structs.replace(w, instructions=tuple(map(_kept, w.instructions))) for w in lowered.instructions.workers
    )
    program = Program(lowered.table, flow.dataflow, workers)
    ports = {(p.work.stage, port.name): port for p in lowered.programs for port in p.results}
    ports |= {(p.work.stage, port.name): port for p in lowered.programs for port in p.reads}
    updated = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b))
    results = []
    for _, (stage, buffer) in sorted(updated.items()):
        port = ports[stage, buffer.value]
        kind = dataclasses.replace(port.type, shape=port.shape(dict(axes[stage])))
        results.append(Result(stage, buffer, kind, placement_text(stage, axes[stage], port)))
    batch = lowered.map.microbatching.batch
    places = places_of_inputs(program, graph.inputs, batch)
    return Pipelined(program, lowered.programs, axes, graph.inputs, batch, places, tuple(results), flow)


def _kept(instruction: Instruction) -> Instruction:
    """An instruction that gives nothing up."""
    return msgspec.structs.replace(instruction, donate=()) if isinstance(instruction, Run | Apply) else instruction


def load_remote_ampnet(
    traced: Traced,
    split_step: SplitStep,
    amp: AmpPipeline,
    cluster: RayCluster,
    progress: Callable[[str], None] | None = None,
) -> RemoteAmpProgram:
    """Starts workers for AMPNet and compiles it there; other arguments are those of `load_remote`.

    Args:
        amp: its programs and what they carry out.

    Raises:
        ScheduleError: a worker has several processes, workers form one world, or see `amp_source`.
        ClusterError: the cluster has not as many devices as the plan wants, or workers do not start.
    """
    deployment = deployment_of(amp_source(split_step, amp), amp.pipeline, cluster)
    if cluster.run.world:
        raise ScheduleError(
            "AMPNet has no order that the workers of a world could follow",
            cause="it takes what arrives, and programs on the devices of two workers have to be begun in one order",
            remedy="Cluster.ray(transport='sockets'), or schedule='pipedream'",
        )
    if max(deployment.hosts) > 1:
        raise ScheduleError(
            f"a stage has {max(deployment.hosts)} processes, whose passes would have to come in one order",
            cause="AMPNet takes what arrives, which is another order in each process",
            remedy="ask Cluster.ray for workers with all devices of a stage, or use schedule='pipedream'",
        )
    runtime = RemotePipeline(cluster.workers, deployment, progress)
    runtime.load()
    program = load_program(traced, split_step, runtime, ())
    return RemoteAmpProgram(**{f.name: getattr(program, f.name) for f in dataclasses.fields(program)})
