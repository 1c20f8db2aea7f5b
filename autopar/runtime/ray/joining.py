"""The way into Ray: an address that answers, or Ray started on this machine, with its token."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
from typing import Any

import ray

from autopar._compat.files import private_folder, write_private
from autopar.errors import ClusterError

LOOPBACK = "127.0.0.1"
#: Seconds that an address has to answer.
_ANSWERS_S = 10.0
#: Ray's own variables of its token.
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
#: Ray's processes read it when they import it: "0" gives a machine the loopback address, on which all servers listen.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
#: libtpu's variable of where it logs; Ray shows the files of /tmp/tpu_logs without it, whoever wrote them.
_TPU_LOGS = "TPU_LOG_DIR"


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
