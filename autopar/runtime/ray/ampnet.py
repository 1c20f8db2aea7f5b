"""AMPNet on workers: each takes what has arrived, and the driver keeps the order that happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.lower.pipeline.stale import AmpPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.ampnet import AmpProgram
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.program import RemoteProgram, deployment_of, load_program
from autopar.runtime.ray.source import Pipelined, Result, placement_text, places_of_inputs
from autopar.runtime.without_flush import outputs_of_updates
from autopar.schedule import Apply, Instruction, Program, Run
from autopar.schedule.ampnet import AmpFlow


def amp_source(split_step: SplitStep, amp: AmpPipeline) -> Pipelined:
    """AMPNet as a step of workers.

    Args:
        split_step: the step as it was lowered.
        amp: its programs and what they carry out.
    """
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
) -> AmpProgram:
    """Starts workers for AMPNet and compiles it there; other arguments are those of `load_remote`.

    Args:
        amp: its programs and what they carry out.

    Raises:
        ScheduleError: a worker has several processes, or workers form one world.
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
    return AmpProgram(program, amp.pipeline.table.name, amp.flow, _on_workers)


def _on_workers(
    program: RemoteProgram, flow: AmpFlow, placed: Sequence[Any], orders: tuple[str, ...]
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """Runs a call; its results are handles."""
    results = program.runtime.step(program.inputs(placed), orders=orders)
    return program.joined(dict(enumerate(results))), program.runtime.orders
