"""The program of a plan with several stages: in this process, and without a flush on workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from autopar._compat.devices import world_devices
from autopar.frontend import Traced
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.pipeline.stale import lower_ampnet, lower_stale
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan
from autopar.runtime.ampnet import load_ampnet
from autopar.runtime.hosts.world_load import load_stages
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.ray.ampnet import load_remote_ampnet
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.stale import load_remote_stale
from autopar.runtime.stale import load_stale
from autopar.schedule.without_flush import flushes, updates_apart
from autopar.search.clock import Clock


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
        if not flushes(plan.schedule):
            stale = lower_stale(split_step.step, plan, arguments, platform)
            return load_stale(traced, split_step, stale, world_devices())
        if updates_apart(plan.schedule):
            return load_ampnet(traced, split_step, lower_ampnet(split_step.step, plan, platform), world_devices())
        given_up = {n for i in donated for n in split_step.names(i)}
        keeps = not as_one and jax.process_count() == 1
        lowered = lower_pipeline(split_step.step, plan, given_up, platform, keeps=keeps)
    say("compiling")
    with clock.phase("compile"):
        return load_stages(traced, split_step, lowered, world_devices(), donated, as_one=as_one)


def build_apart_on_workers(
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
        step = split_step.step
        arguments = {n for i in range(len(traced.arguments)) for n in split_step.names(i)}
        stale = None if flushes(plan.schedule) else lower_stale(step, plan, arguments, platform)
        amp = lower_ampnet(step, plan, platform) if stale is None else None
    with clock.phase("compile"):
        if stale is not None:
            return load_remote_stale(traced, split_step, stale, cluster, progress)
        assert amp is not None
        return load_remote_ampnet(traced, split_step, amp, cluster, progress)
