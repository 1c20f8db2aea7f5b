"""A running Ray cluster, or one started on this machine, as a `RayCluster`."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import ray

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.runtime.ray.actors import RayCrew
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.crew import Crew
from autopar.runtime.ray.messages import Hello

_LOOPBACK = "127.0.0.1"


def connect(
    address: str | None,
    *,
    workers: int = 2,
    devices_per_worker: int = 4,
    like: str = "local-cpu",
    object_store_bytes: int = 80 * 2**20,
) -> RayCluster:
    """A cluster of workers on Ray; `autopar.runtime.ray.start` has to be called instead.

    Args:
        address: of a running Ray cluster; None starts one here, unless this process is connected already.
        workers: see `autopar.Cluster.ray`.
        devices_per_worker: likewise.
        like: likewise.
        object_store_bytes: likewise.
    """
    for name, count in (("workers", workers), ("devices_per_worker", devices_per_worker)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ClusterError(f"{name}={count!r} is no count", remedy="give 1 or more")
    group = Cluster.load(like).groups[0]
    own = not ray.is_initialized()
    end = None
    if own:
        folder = None if address else tempfile.mkdtemp(prefix="autopar-ray-")
        end = functools.partial(_end, folder)
        try:
            _initialize(address, workers, object_store_bytes, folder)
        except ClusterError:
            end()
            raise
        atexit.register(end)
    nodes = _alive()
    if sum(n["Resources"].get("CPU", 0) for n in nodes) < workers:
        have = int(sum(n["Resources"].get("CPU", 0) for n in nodes))
        raise ClusterError(
            f"{workers} workers need a CPU each; Ray has {have}",
            remedy="ask for fewer workers, or start Ray with --num-cpus",
        )
    group = dataclasses.replace(group, count=workers, devices_per_node=devices_per_worker)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_worker}",
    }
    slot = Slot(devices_per_worker, "cpu", environment, {"num_cpus": 1})
    listen = _LOOPBACK if len(nodes) == 1 else _own_address()
    name = f"ray-{like.removeprefix('local-')}"
    return RayCluster(name, (group,), (slot,) * workers, listen, launch, end)


def _alive() -> list[dict[str, Any]]:
    return [n for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _initialize(address: str | None, workers: int, object_store_bytes: int, folder: str | None) -> None:
    here: dict[str, Any] = {
        "address": "local", "num_cpus": workers, "num_gpus": 0, "include_dashboard": False,
        "_node_ip_address": _LOOPBACK, "object_store_memory": object_store_bytes, "_temp_dir": folder,
    }  # fmt: skip
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
    if address is None and _own_address() != _LOOPBACK:
        raise ClusterError(
            "Ray would listen on all addresses of this machine",
            cause="ray was imported before autopar could tell it otherwise",
            remedy="set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before ray is imported, or start Ray yourself and give "
            "its address",
        )


def _end(folder: str | None) -> None:
    """Disconnects from Ray; one that was started here ends, and its folder goes."""
    ray.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def launch(hellos: Sequence[Hello], slots: Sequence[Slot]) -> Crew:
    """Starts a worker in each slot."""
    return RayCrew(hellos, [s.environment for s in slots], [s.resources for s in slots])
