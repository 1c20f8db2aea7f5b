"""A running Ray cluster, or one started on this machine, as a `RayCluster`."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from autopar._compat.files import private_folder
from autopar.cluster.ray_options import Devices, RayOptions
from autopar.errors import ClusterError
from autopar.runtime.ray.actors import RayWorkerGroup
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.joining import LOOPBACK, check_answers, check_is_ray, forget_token, initialize, own_address
from autopar.runtime.ray.machine import RAY_MARK, clean_up, guard
from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.nodes import Machine, WorkerPlacement, layout, machines, planned
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.placing import Placement
from autopar.runtime.ray.worker_group import WorkerGroup

#: Paths of sockets have at most 107 characters; Ray appends up to 76 to its folder.
_LONGEST = 18


def connect(address: str | None, options: RayOptions) -> RayCluster:
    """A cluster of workers on Ray; `autopar.runtime.ray.start` has to be called instead.

    Args:
        address: of a running Ray cluster; None starts one here, unless this process is connected already.
        options: how workers are started and used.
    """
    if address is not None:
        check_answers(address)
        if not ray.is_initialized():
            check_is_ray(address)
    starts_ray = not ray.is_initialized()
    folder = _new_folder()
    worker_groups: list[RayWorkerGroup] = []
    mark = f"{RAY_MARK}={secrets.token_hex(8)}"
    end = functools.partial(_end, folder, mark, guard(mark, folder), worker_groups, starts_ray)
    # On a machine of its own, GPUs are looked for where they are asked for.
    kind: Devices = "cpu" if starts_ray and address is None and options.devices == "auto" else options.devices
    try:
        if starts_ray:
            nodes = len(options.sizes) if len(options.sizes) > 1 else options.workers or 2
            initialize(address, nodes, options.object_store_bytes, folder, mark, kind, options.start_s)
        machines_there = machines(_nodes())
        wanted = _placement(machines_there, kind, options)
        planner = planned(wanted)
    except BaseException:
        end()
        raise
    atexit.register(end)
    run_options = _run_options(options, wanted.platform, len(machines_there), folder)
    # Workers share the processors of one machine that is theirs.
    shared = address is None and wanted.kind == "cpu"
    custom, selected = tuple((options.resources or {}).items()), tuple((options.labels or {}).items())
    slots = tuple(dataclasses.replace(s, shared=shared, custom=custom, labels=selected) for s in wanted.slots)
    launch = functools.partial(_launch, worker_groups, slots, options.start_s, dict(options.runtime_env or {}))
    driver = Driver(launch, run_options, lambda: wanted.room(machines(_nodes())))
    return RayCluster(
        planner.name, planner.groups,
        tuple(s for s, w in zip(slots, wanted.workers, strict=True) for _ in range(w.count)),
        run_options, launch, end, worker_groups, options.hosts_per_stage, driver,
    )  # fmt: skip


def _placement(machines_there: Sequence[Machine], kind: Devices, options: RayOptions) -> WorkerPlacement:
    """Workers on machines; ClusterError where they cannot be in groups as large as a stage wants."""
    wanted = layout(machines_there, kind, options.workers, options.devices_per_worker, options.like)
    if any(w.count % options.hosts_per_stage for w in wanted.workers):
        counts = " and ".join(str(w.count) for w in wanted.workers)
        raise ClusterError(
            f"{counts} workers cannot be in groups of {options.hosts_per_stage}",
            remedy="give a divisor as hosts_per_stage",
        )
    return wanted


def _run_options(options: RayOptions, platform: str, num_machines: int, folder: str) -> RunOptions:
    several = num_machines > 1
    return RunOptions(
        deadline_s=options.deadline_s, recover=options.recover, copy_every=options.copy_every, platform=platform,
        listen=own_address() if several else LOOPBACK, each_own=several,
        cache=str(Path(folder, "programs")) if options.cache is None else options.cache,
        own_cache=options.cache is None, encrypted=several, open_collectives=options.hosts_per_stage > 1,
        transport=options.transport, start_s=options.start_s, load_s=options.load_s, attempts=options.attempts,
        repeats=options.repeats, backoff_s=options.backoff_s,
    )  # fmt: skip


def _new_folder() -> str:
    """A folder for what Ray and workers write; with a short path, since sockets have theirs below it."""
    short = len(tempfile.gettempdir()) <= _LONGEST or not os.path.isdir("/tmp")
    return str(private_folder(tempfile.mkdtemp(prefix="autopar-", dir=None if short else "/tmp")))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _end(
    folder: str, mark: str, guarding: subprocess.Popen[bytes], worker_groups: list[RayWorkerGroup], started_ray: bool
) -> None:
    """Ends all workers; Ray ends if it was started or joined here, and the folder goes."""
    while worker_groups:
        worker_groups.pop().kill()
    if started_ray:
        ray.shutdown()
        forget_token(folder)
    clean_up(mark, folder)
    if guarding.stdin is not None:
        guarding.stdin.close()
    guarding.wait()


def _launch(
    worker_groups: list[RayWorkerGroup],
    kinds_of_slots: Sequence[Slot],
    limit_s: float,
    runtime_env: Mapping[str, Any],
    handshakes: Sequence[Handshake],
    devices: Sequence[int],
    kinds: Sequence[int] = (),
) -> WorkerGroup:
    slots = [kinds_of_slots[k].of(n) for n, k in zip(devices, kinds or [0] * len(devices), strict=True)]
    # Who shares a machine needs no room there. Others have all of it or none.
    placement = None
    if not slots[0].shared:
        placement = Placement(slots, len(machines(_nodes())), min(limit_s, 60.0))
    settings = [s.resources if placement is None else placement.options(n, s) for n, s in enumerate(slots)]
    try:
        worker_group = RayWorkerGroup(
            handshakes, [s.environment for s in slots], settings, limit_s, placement, runtime_env
        )
    except BaseException:
        if placement is not None:
            placement.close()
        raise
    worker_groups[:] = [*(g for g in worker_groups if not g.ended), worker_group]
    return worker_group
