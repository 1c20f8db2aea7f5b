"""A running Ray cluster, or one started on this machine, as a `RayCluster`."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import os
import secrets
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import ray

from autopar._compat.private import private_folder, write_private
from autopar.errors import ClusterError
from autopar.runtime.ray.actors import RayWorkerGroup
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.machine import RAY_MARK, clean_up, guard
from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.nodes import Devices, layout, machines, planned
from autopar.runtime.ray.options import RunOptions, Transport
from autopar.runtime.ray.placing import Placement
from autopar.runtime.ray.worker_group import WorkerGroup

_LOOPBACK = "127.0.0.1"
#: Paths of sockets have at most 107 characters; Ray appends up to 76 to its folder.
_LONGEST = 18
#: Seconds that an address has to answer.
_ANSWERS_S = 10.0
#: Ray's own variables of its token.
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def connect(
    address: str | None,
    *,
    workers: int | None = None,
    devices_per_worker: int | None = None,
    hosts_per_stage: int = 1,
    devices: Devices = "auto",
    like: str | None = None,
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
    if transport not in get_args(Transport):
        raise ClusterError(f"transport={transport!r} is not known", remedy=f"one of: {', '.join(get_args(Transport))}")
    counts = {"workers": workers, "devices_per_worker": devices_per_worker, "hosts_per_stage": hosts_per_stage,
              "attempts": attempts, "repeats": repeats}  # fmt: skip
    for name, seconds in {"deadline_s": deadline_s, "start_s": start_s, "load_s": load_s}.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ClusterError(f"{name}={seconds!r} is no time", remedy="give seconds, more than 0")
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ClusterError(f"{name}={count!r} is no count", remedy="give 1 or more")
    if address is not None:
        _check_answers(address)
    own = not ray.is_initialized()
    folder = _new_folder()
    worker_groups: list[RayWorkerGroup] = []
    mark = f"{RAY_MARK}={secrets.token_hex(8)}"
    end = functools.partial(_end, folder, mark, guard(mark, folder), worker_groups, own)
    # On a machine of its own, GPUs are looked for where they are asked for.
    kind: Devices = "cpu" if own and address is None and devices == "auto" else devices
    try:
        if own:
            _initialize(address, workers or 2, object_store_bytes, folder, mark, kind)
        found = machines(_nodes())
        wanted = layout(found, kind, workers, devices_per_worker, like)
        if wanted.workers % hosts_per_stage:
            raise ClusterError(
                f"{wanted.workers} workers cannot be in groups of {hosts_per_stage}",
                remedy="give a divisor as hosts_per_stage",
            )
        planner = planned(wanted)
    except BaseException:
        end()
        raise
    atexit.register(end)
    options = RunOptions(
        deadline_s=deadline_s, recover=recover, copy_every=copy_every, platform=wanted.slot.platform,
        listen=_LOOPBACK if len(found) == 1 else _own_address(), each_own=len(found) > 1,
        cache=str(Path(folder, "programs")) if cache is None else cache, own_cache=cache is None,
        encrypted=len(found) > 1,
        transport=transport, start_s=start_s, load_s=load_s, attempts=attempts, repeats=repeats,
    )  # fmt: skip
    # Workers share the processors of one machine that is theirs.
    shared = address is None and wanted.kind == "cpu"
    slot = dataclasses.replace(
        wanted.slot, shared=shared, custom=tuple((resources or {}).items()), labels=tuple((labels or {}).items())
    )
    launch = functools.partial(_launch, worker_groups, slot, options.start_s, dict(runtime_env or {}))
    driver = Driver(launch, options, lambda: wanted.room(machines(_nodes())))
    return RayCluster(
        planner.name, planner.groups, (slot,) * wanted.workers, options, launch, end, worker_groups, hosts_per_stage,
        driver,
    )  # fmt: skip


def _check_answers(address: str) -> None:
    """Raises ClusterError where nothing listens at an address: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:  # "auto", and names that Ray alone knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"nothing answers at {address}: {error}",
            cause="no Ray cluster runs there, or a firewall is between",
            remedy="check the address with `ray status --address ...`; leave it out to start Ray here",
        ) from error


def _new_folder() -> str:
    """A folder for what Ray and workers write; with a short path, since sockets have theirs below it."""
    short = len(tempfile.gettempdir()) <= _LONGEST or not os.path.isdir("/tmp")
    return str(private_folder(tempfile.mkdtemp(prefix="autopar-", dir=None if short else "/tmp")))


def _nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _initialize(address: str | None, workers: int, object_store_bytes: int, folder: str, mark: str, kind: str) -> None:
    # Ray makes its folder one that everybody may write to: it lies in one that nobody else can enter.
    below = os.path.join(folder, "r")
    here: dict[str, Any] = {
        "address": "local", "num_cpus": workers, "num_gpus": None if kind == "gpu" else 0, "include_dashboard": False,
        "_node_ip_address": _LOOPBACK, "object_store_memory": object_store_bytes, "_temp_dir": below,
        # Workers have environments of their own: a process that Ray starts ahead of time is never one of them. And they
        # are what the machine is there for: as Ray has it they would yield to everything else that runs.
        "_system_config": {"prestart_worker_first_driver": False, "worker_niceness": 0},
    }  # fmt: skip
    name, _, value = mark.partition("=")
    os.environ[name] = value  # for the processes of Ray
    if address is None:
        _require_token(folder)
    try:
        with warnings.catch_warnings():
            # What Ray forks turns into another program at once, which is safe.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
            ray.init(configure_logging=False, log_to_driver=True, **({"address": address} if address else here))
    except Exception as error:
        raise ClusterError(
            f"Ray does not {'answer' if address else 'start'}: {error}",
            cause="no cluster runs at that address" if address else "this machine has too little memory",
            remedy="check the address with `ray status`; leave it out to start Ray here",
        ) from error
    finally:
        os.environ.pop(name)
    if address is not None and not _has_token():
        warnings.warn(
            f"the Ray cluster at {address} runs what anybody tells it who reaches it: start it with {_MODE}=token",
            stacklevel=4,
        )
    if address is None and _own_address() != _LOOPBACK:
        raise ClusterError(
            "Ray would listen on all addresses of this machine",
            cause="ray was imported before autopar could tell it otherwise",
            remedy="set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before ray is imported, or start Ray yourself and give "
            "its address",
        )


def _require_token(folder: str) -> None:
    """From now on Ray that is started here takes commands only with a token, which lies in a folder of this user.

    What the user says about Ray's token holds. ClusterError where this Ray knows no tokens.
    """
    if any(name in os.environ for name in (_MODE, _TOKEN, _TOKEN_PATH)):
        return
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is None:
        raise ClusterError(
            f"Ray {ray.__version__} takes commands from every user of this machine",
            cause="it knows no tokens, which came with Ray 2.52",
            remedy=f"pip install -U ray, or set {_MODE}=disabled where nobody else uses this machine",
        )
    path = os.path.join(folder, "token")
    write_private(path, secrets.token_hex(32).encode())
    os.environ.update({_MODE: "token", _TOKEN_PATH: path})
    _reread_token()


def _forget_token(folder: str) -> None:
    if os.environ.get(_TOKEN_PATH) == os.path.join(folder, "token"):
        del os.environ[_TOKEN_PATH], os.environ[_MODE]
        _reread_token()


def _reread_token() -> None:
    """Ray remembers what the environment said when it was imported."""
    internal: Any = ray._raylet
    internal.Config.initialize("")
    internal.AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    """Whether the Ray that this process is connected to asks for a token."""
    internal: Any = ray._raylet
    mode = getattr(internal, "get_authentication_mode", None)
    return mode is not None and bool(mode() == internal.AuthenticationMode.TOKEN)


def _end(
    folder: str, mark: str, guarding: subprocess.Popen[bytes], worker_groups: list[RayWorkerGroup], own: bool
) -> None:
    """Ends all workers; Ray ends if it was started or joined here, and the folder goes."""
    while worker_groups:
        worker_groups.pop().kill()
    if own:
        ray.shutdown()
        _forget_token(folder)
    clean_up(mark, folder)
    if guarding.stdin is not None:
        guarding.stdin.close()
    guarding.wait()


def _launch(
    worker_groups: list[RayWorkerGroup],
    slot: Slot,
    limit_s: float,
    runtime_env: Mapping[str, Any],
    handshakes: Sequence[Handshake],
    devices: Sequence[int],
) -> WorkerGroup:
    slots = [slot.of(n) for n in devices]
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
