"""A running Ray cluster, or one started on this machine with its token, as a `RayCluster`.

`connect` is called by `autopar.runtime.ray.start`. It joins an address that answers (`check_answers`, `check_is_ray`),
or starts Ray (`initialize`), and launches workers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from autopar._compat.files import private_folder, write_private
from autopar.cluster.ray_options import Devices, RayOptions
from autopar.errors import ClusterError
from autopar.runtime.ray.actors import Placement, RayWorkerGroup
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.machine import RAY_MARK, clean_up, guard
from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.nodes import Machine, WorkerPlacement, layout, machines, planned
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.worker_group import WorkerGroup

#: Paths of sockets have at most 107 characters; Ray appends up to 76 to its folder.
_LONGEST = 18
LOOPBACK = "127.0.0.1"
#: Seconds that an address has to answer.
_ANSWERS_S = 10.0
#: Ray's own variables of its token.
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
#: Ray's processes read it when they import it: "0" gives a machine the loopback address, on which all servers listen.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
#: libtpu's variable of where it logs; Ray shows the files of /tmp/tpu_logs without it, whoever wrote them.
_TPU_LOGS = "TPU_LOG_DIR"


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
    cache = str(Path(folder, "programs")) if options.cache is None else options.cache
    return RunOptions(
        **{**vars(options), "cache": cache},
        own_cache=options.cache is None,
        encrypted=several,
        open_collectives=options.hosts_per_stage > 1,
        listen=own_address() if several else LOOPBACK,
        each_own=several,
        platform=platform,
    )


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


def check_answers(address: str) -> None:
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


def check_is_ray(address: str, limit_s: float = _ANSWERS_S) -> None:
    """Raises ClusterError where what listens at an address does not answer as Ray: Ray would try for minutes.

    Args:
        address: host and port of a running cluster; others, as "auto", are left to Ray.
        limit_s: seconds that it has to answer.
    """
    client = getattr(ray._raylet, "GcsClient", None)
    if client is None or not address.rpartition(":")[2].isdecimal() or "/" in address:
        return
    # Ray itself decides what its answer means; a thread, since it takes longer where there is none.
    asking = threading.Thread(target=_ask, args=(client, address), name="ask", daemon=True)
    asking.start()
    asking.join(limit_s)
    if asking.is_alive():
        raise ClusterError(
            f"what listens at {address} does not answer as Ray does within {limit_s:g} s",
            cause="it is another program, or another of Ray's ports: the GCS has 6379 where nothing else was said",
            remedy="check the address with `ray status --address ...`; leave it out to start Ray here",
        )


def _ask(client: Any, address: str) -> None:
    with contextlib.suppress(Exception):
        client(address=address)


def own_address() -> str:
    """The address of this machine as Ray knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _settings(start_s: float) -> dict[str, Any]:
    """Settings of a Ray that is started here which differ from its own; ``start_s`` as of `initialize`."""
    return {
        # Workers have environments of their own: a process that Ray starts ahead of time is never one of them.
        "prestart_worker_first_driver": False,
        # They are what the machine is there for: as Ray has it they would yield to everything else that runs.
        "worker_niceness": 0,
        # Ray ends a process that is slower, and starts the next.
        "worker_register_timeout_seconds": max(60, math.ceil(start_s)),
    }


def initialize(
    address: str | None, workers: int, object_store_bytes: int, folder: str, mark: str, kind: str, start_s: float
) -> None:
    """Connects this process to Ray, or starts it on this machine.

    Args:
        address: of a running cluster; None starts one.
        workers: number of workers that a Ray that is started here has room for.
        object_store_bytes: its shared memory.
        folder: in which it writes.
        mark: variable of its processes, as ``NAME=value``.
        kind: of the devices that are wanted.
        start_s: seconds that a worker may take to start.

    Raises:
        ClusterError: Ray does not answer or start, or would listen on all addresses.
    """
    # Ray makes its folder one that everybody may write to: it lies in one that nobody else can enter.
    below = os.path.join(folder, "r")
    here: dict[str, Any] = {
        "address": "local", "num_cpus": workers, "num_gpus": None if kind == "gpu" else 0, "include_dashboard": False,
        "_node_ip_address": LOOPBACK, "object_store_memory": object_store_bytes, "_temp_dir": below,
        "_system_config": _settings(start_s),
    }  # fmt: skip
    name, _, value = mark.partition("=")
    for_ray = {name: value, **({} if address else _own_logs(folder))}
    os.environ.update(for_ray)
    if address is None:
        _require_token(folder)
        _stay_on_loopback()
    before = signal.getsignal(signal.SIGTERM)
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
        for variable in for_ray:
            os.environ.pop(variable)
        _keep_handler(before)
    if address is not None and not _has_token():
        warnings.warn(
            f"the Ray cluster at {address} runs what anybody tells it who reaches it: start it with {_MODE}=token",
            stacklevel=4,
        )
    if address is None and own_address() != LOOPBACK:
        raise ClusterError(
            "Ray would listen on all addresses of this machine",
            cause=f"{_ONE_MACHINE} is {os.environ[_ONE_MACHINE]!r}",
            remedy=f"set {_ONE_MACHINE}=0, or start Ray yourself and give its address",
        )


def _stay_on_loopback() -> None:
    """Ray that is started here listens on the loopback address, also where it was imported before."""
    constants: Any = ray._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = os.environ.setdefault(_ONE_MACHINE, "0").lower() in ("1", "true")


def _own_logs(folder: str) -> dict[str, str]:
    """Variables by which libtpu writes its logs into a folder. Ray shows all that it finds where they are otherwise."""
    if _TPU_LOGS in os.environ:
        return {}
    return {_TPU_LOGS: str(private_folder(os.path.join(folder, "tpu_logs")))}


def _keep_handler(before: Any) -> None:
    """Puts this process's handler of SIGTERM back: Ray's prints a trace and exits with 15."""
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGTERM, _exit if before == signal.SIG_DFL else before)


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _require_token(folder: str) -> None:
    """Makes a Ray that is started here take commands only with a token, which lies in a folder of this user.

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


def forget_token(folder: str) -> None:
    """Ray that is started from now on has another token than the one in a folder."""
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
