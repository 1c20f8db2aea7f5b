"""A running Ray cluster, or one started on this machine, as a `RayCluster`."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import ray

from autopar._compat.private import private_folder
from autopar.errors import ClusterError
from autopar.runtime.ray.actors import RayWorkerGroup
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.joining import LOOPBACK, check_answers, check_is_ray, forget_token, initialize, own_address
from autopar.runtime.ray.machine import RAY_MARK, clean_up, guard
from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.nodes import Devices, layout, machines, planned
from autopar.runtime.ray.options import RunOptions, Transport
from autopar.runtime.ray.placing import Placement
from autopar.runtime.ray.worker_group import WorkerGroup

#: Paths of sockets have at most 107 characters; Ray appends up to 76 to its folder.
_LONGEST = 18


def connect(
    address: str | None,
    *,
    workers: int | None = None,
    devices_per_worker: int | Sequence[int] | None = None,
    hosts_per_stage: int = 1,
    devices: Devices = "auto",
    like: str | Mapping[str, str] | None = None,
    object_store_bytes: int = 80 * 2**20,
    deadline_s: float = 300.0,
    recover: bool = False,
    copy_every: int = 10,
    cache: str | None = None,
    transport: Transport = "auto",
    start_s: float = 300.0,
    load_s: float = 900.0,
    attempts: int = 10,
    repeats: int = 3,
    runtime_env: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
) -> RayCluster:
    """A cluster of workers on Ray; `autopar.runtime.ray.start` has to be called instead.

    Args:
        address: of a running Ray cluster; None starts one here, unless this process is connected already.
        workers: see `autopar.Cluster.ray`.
        devices_per_worker: likewise.
        hosts_per_stage: likewise.
        devices: likewise.
        like: likewise.
        object_store_bytes: likewise.
        deadline_s: likewise.
        recover: likewise.
        copy_every: likewise.
        cache: likewise.
        transport: likewise.
        start_s: likewise.
        load_s: likewise.
        attempts: likewise.
        repeats: likewise.
        runtime_env: likewise.
        resources: likewise.
        labels: likewise.
    """
    sizes = devices_per_worker if isinstance(devices_per_worker, Sequence) else [devices_per_worker]
    counts = {"workers": workers, "hosts_per_stage": hosts_per_stage, "attempts": attempts, "repeats": repeats}
    seconds = {"deadline_s": deadline_s, "start_s": start_s, "load_s": load_s}
    _check(transport, seconds, [*counts.items(), *(("devices_per_worker", n) for n in sizes)])
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
    kind: Devices = "cpu" if starts_ray and address is None and devices == "auto" else devices
    try:
        if starts_ray:
            initialize(address, len(sizes) if len(sizes) > 1 else workers or 2, object_store_bytes, folder, mark, kind)
        machines_there = machines(_nodes())
        wanted = layout(machines_there, kind, workers, devices_per_worker, like)
        if any(w.count % hosts_per_stage for w in wanted.workers):
            counts_text = " and ".join(str(w.count) for w in wanted.workers)
            raise ClusterError(
                f"{counts_text} workers cannot be in groups of {hosts_per_stage}",
                remedy="give a divisor as hosts_per_stage",
            )
        planner = planned(wanted)
    except BaseException:
        end()
        raise
    atexit.register(end)
    options = RunOptions(
        deadline_s=deadline_s, recover=recover, copy_every=copy_every, platform=wanted.platform,
        listen=LOOPBACK if len(machines_there) == 1 else own_address(), each_own=len(machines_there) > 1,
        cache=str(Path(folder, "programs")) if cache is None else cache, own_cache=cache is None,
        encrypted=len(machines_there) > 1, open_collectives=hosts_per_stage > 1,
        transport=transport, start_s=start_s, load_s=load_s, attempts=attempts, repeats=repeats,
    )  # fmt: skip
    # Workers share the processors of one machine that is theirs.
    shared = address is None and wanted.kind == "cpu"
    custom, selected = tuple((resources or {}).items()), tuple((labels or {}).items())
    slots = tuple(dataclasses.replace(s, shared=shared, custom=custom, labels=selected) for s in wanted.slots)
    launch = functools.partial(_launch, worker_groups, slots, options.start_s, dict(runtime_env or {}))
    driver = Driver(launch, options, lambda: wanted.room(machines(_nodes())))
    return RayCluster(
        planner.name, planner.groups,
        tuple(s for s, w in zip(slots, wanted.workers, strict=True) for _ in range(w.count)),
        options, launch, end, worker_groups, hosts_per_stage, driver,
    )  # fmt: skip


def _check(transport: str, seconds: Mapping[str, Any], counts: Sequence[tuple[str, Any]]) -> None:
    """ClusterError where an option has a value that means nothing."""
    if transport not in get_args(Transport):
        raise ClusterError(f"transport={transport!r} is not known", remedy=f"one of: {', '.join(get_args(Transport))}")
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ClusterError(f"{name}={value!r} is no time", remedy="give seconds, more than 0")
    for name, count in counts:
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ClusterError(f"{name}={count!r} is no count", remedy="give 1 or more")


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
