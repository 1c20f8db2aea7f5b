"""From a plan to a program: pipelines lowered and compiled, and the checks before something runs.

`build_stages` and `build_without_flush_on_workers` compile plans with several stages. `check_effects`,
`check_devices` and `check_for_workers` refuse steps and plans that cannot run. Plans from files that somebody may have
changed run once they are proven, or are refused: `verify_unproven` proves what can be proven before a plan is lowered;
`carried_out` refuses what goes wrong after. Plans of searches, and of files with the digest of their content, are
neither.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import jax

from autopar._compat.devices import world_devices
from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, PlanMismatchError, TraceError
from autopar.errors.names import counted
from autopar.frontend import Traced
from autopar.ir import Graph
from autopar.ir.analysis import operators_with_bodies, unread_inputs
from autopar.ir.primitives import CALLBACKS
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.pipeline.without_flush import lower_without_flush
from autopar.lower.program import plan_tables
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan
from autopar.runtime.ampnet import load_ampnet
from autopar.runtime.hosts.one_program import load_world
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.pipeline import load_pipeline
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.without_flush import load_remote_ampnet, load_remote_stale
from autopar.runtime.without_flush import load_stale
from autopar.schedule.without_flush.lists import Windows
from autopar.schedule.without_flush.schedules import updates_stagewise
from autopar.search.clock import Clock
from autopar.sharding.verify_plan import verify_arguments, verify_plan, wrong_entry


def build_stages(
    traced: Traced,
    plan: Plan,
    donated: Sequence[int],
    clock: Clock,
    say: Callable[[str], None],
    *,
    as_one: bool = False,
) -> LoadedProgram:
    """Lowers and compiles a pipeline.

    Args:
        traced: the function.
        plan: its plan, of several stages.
        donated: indices of the traced leaves that the caller gives up.
        clock: takes the time of the phases.
        say: called with the name of a phase.
        as_one: whether it is one XLA program on all devices.
    """
    platform = jax.devices()[0].platform
    with clock.phase("lower"):
        split_step = split_layers(traced, plan.content.stack_groups)
        arguments = {n for i in range(len(traced.arguments)) for n in split_step.names(i)}
        if updates_stagewise(plan.schedule):
            unflushed = lower_without_flush(split_step.step, plan, arguments, platform)
            if isinstance(unflushed.calls, Windows):
                return load_stale(traced, split_step, unflushed.pipeline, unflushed.calls, world_devices())
            return load_ampnet(traced, split_step, unflushed.pipeline, unflushed.calls, world_devices())
        given_up = {n for i in donated for n in split_step.names(i)}
        lowered = lower_pipeline(split_step.step, plan, given_up, platform)
    say("compiling")
    with clock.phase("compile"):
        load = load_world if as_one else load_pipeline
        return load(traced, split_step, lowered, world_devices(), donated)


def build_without_flush_on_workers(
    traced: Traced, plan: Plan, cluster: RayCluster, clock: Clock, progress: Callable[[str], None] | None
) -> LoadedProgram:
    """Lowers a pipeline whose stages update each for itself and compiles it on workers.

    Args:
        traced: the function.
        plan: its plan, of several stages.
        cluster: where the workers are.
        clock: takes the time of the phases.
        progress: called with what is being done.
    """
    platform = cluster.run.platform
    with clock.phase("lower"):
        split_step = split_layers(traced, plan.content.stack_groups)
        arguments = {n for i in range(len(traced.arguments)) for n in split_step.names(i)}
        unflushed = lower_without_flush(split_step.step, plan, arguments, platform)
    with clock.phase("compile"):
        if isinstance(unflushed.calls, Windows):
            return load_remote_stale(traced, split_step, unflushed.pipeline, unflushed.calls, cluster, progress)
        return load_remote_ampnet(traced, split_step, unflushed.pipeline, unflushed.calls, cluster, progress)


def check_effects(graph: Graph) -> None:
    """Refuses what cannot run: effects in program order, which XLA keeps on one device.

    Raises:
        TraceError: an ordered callback or print; it has the user's line.
    """
    for op in operators_with_bodies(graph):
        ordered = [e for e in op.effects if e.startswith("Ordered")]
        if ordered:
            raise TraceError(
                f"{graph.name} has an ordered {op.primitive}",
                cause="XLA keeps the order of callbacks on one device only",
                remedy="leave out ordered=True, or return the value and print it outside of the step",
                source=op.source or None,
            )


def check_callbacks(graph: Graph, cluster: Cluster | None) -> None:
    """Refuses callbacks into Python where workers run the step, before anything is planned.

    Those at the top of the step of which nothing is returned are left out of stages, and pass.

    Args:
        graph: a step.
        cluster: that will run it; None for the devices of this process.

    Raises:
        ClusterError: a callback that results need, on a cluster of workers; it has the user's line.
    """
    if not isinstance(cluster, RayCluster):
        return
    left_out = {op.id for op in graph.operators if not op.results}
    calls = [op for op in operators_with_bodies(graph) if op.primitive in CALLBACKS and op.id not in left_out]
    if calls:
        raise ClusterError(
            f"{graph.name} calls Python {len(calls)} times ({calls[0].primitive}), "
            f"and {counted(cluster.num_devices, 'device')} of workers on Ray run it",
            cause="a callback, as those of autopar.transforms.on_disk, which reads and writes files of this process",
            remedy='cluster=Cluster.local(), or leave the callback out; in place of on_disk offload="auto" or '
            'offload="update" keeps moments in host memory of the workers',
            source=calls[0].source or None,
        )


def verify_unproven(plan: Plan, traced: Traced, donated: Sequence[int]) -> None:
    """Raises PlanMismatchError, with the path of the first wrong entry, unless a plan is right about a function.

    Stages of pipelines are proven when they are lowered.

    Args:
        plan: any.
        traced: the function, in the form that the plan is of.
        donated: numbers of the arguments that the caller gives up.
    """
    if not plan.unproven:
        return
    if plan.num_stages == 1:
        verify_plan(traced.graph, plan.content, plan_tables(plan))
    else:
        verify_arguments(traced.graph, plan.content)
    given_up = {traced.arguments[n][0] for n in donated}
    for n, path in enumerate(plan.content.donated):
        if path not in given_up:
            raise wrong_entry(f"plan.donated[{n}]", f"{path!r} is not donated")


@contextmanager
def carried_out(plan: Plan) -> Iterator[None]:
    """Within it an error of lowering or compiling an unproven plan is one of the plan."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        if not plan.unproven:
            raise
        raise PlanMismatchError(
            f"the plan cannot be carried out: {type(error).__name__}: {error}",
            cause="its file is older, was changed by hand, or damaged",
            remedy="plan again, or undo the change",
        ) from error


def check_for_workers(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanMismatchError unless workers of ``cluster`` can carry out ``plan``."""
    content = plan.content
    if content.pipeline is None:
        raise PlanMismatchError(
            f"the plan has one stage, and {cluster.name} runs pipelines",
            remedy="plan with cluster=Cluster.ray(...), of one worker too",
        )


def warn_of_unused(graph: Graph, donated: Collection[int]) -> None:
    """Warns as `jax.jit` does of donated inputs that no result of the same type replaces; they are deleted too.

    Args:
        graph: of the step.
        donated: indices of the donated inputs.
    """
    results = Counter(o.type for o in graph.outputs)
    unread, unused = unread_inputs(graph), []
    for i in sorted(set(donated) - set(unread)):
        type = graph.inputs[i].type
        results[type] -= 1
        if results[type] < 0:
            unused.append(f"{graph.inputs[i].name} {type}")
    if unused:
        warnings.warn(
            f"Some donated buffers were not usable: {', '.join(unused)}.\n"
            "See an explanation at https://docs.jax.dev/en/latest/faq.html#buffer-donation.",
            stacklevel=2,
        )


def check_devices(plan: Plan | None, cluster: Cluster | None, count: int) -> None:
    """Raises where what is to run needs another number of devices than ``count``, before anything is planned.

    Args:
        plan: that was given; None where one will be made.
        cluster: that it will be made for; None takes the devices that there are.
        count: devices of all processes.

    Raises:
        PlanMismatchError: the plan is for another number.
        ClusterError: the cluster has another number.
    """
    if plan is not None:
        wanted = len({d for s in plan.stages for d in s.devices})
        if wanted != count:
            raise PlanMismatchError(
                f"the plan is for {counted(wanted, 'device')} of {plan.content.cluster_name}; this process has {count}",
                cause="the plan was made for another cluster",
                remedy="plan again for Cluster.local(), or run where there are as many devices",
            )
    elif cluster is not None and cluster.num_devices != count:
        raise ClusterError(
            f"{cluster} has {counted(cluster.num_devices, 'device')}; this process has {count}, so the step cannot "
            "run here",
            cause="the cluster was given to plan for it; .plan() and .lower().plan need none of its devices",
            remedy="cluster=None to run on the devices that there are, or run where the cluster's are (on CPU: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N)",
        )
