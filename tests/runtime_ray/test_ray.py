"""Workers as processes on Ray. One Ray for the whole file: it takes seconds to start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, WorkerLostError
from autopar.runtime.checkpoints import Checkpoints
from autopar.runtime.ray import Deployment, Driver, RemoteArray, RemotePipeline, RunOptions
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.machine import exists
from examples import mlp as mlp_module
from tests.runtime_ray.pipelines import Example, example, example_of, furthest, kept, numbers, trained, trained_plain

pytest.importorskip("flatbuffers")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    import ray  # noqa: F401  (before autopar does, as many programs do: it is on loopback all the same)

    with Cluster.ray(workers=2, devices_per_worker=2) as made:
        yield made


@pytest.fixture(scope="module")
def mlp() -> Example:
    return example("mlp", 2, layers=2, hidden=16, batch=8)


def started(
    cluster: RayCluster,
    made: Example,
    devices: tuple[int, ...] = (2, 2),
    hosts: tuple[int, ...] = (),
    **options: Any,
) -> RemotePipeline:
    driver = Driver(cluster.start, RunOptions(**options))
    pipeline = RemotePipeline(driver, Deployment(made.source, devices, hosts))
    pipeline.load()
    return pipeline


@pytest.fixture(scope="module")
def shared_pipeline(cluster: RayCluster, mlp: Example) -> Iterator[RemotePipeline]:
    made = started(cluster, mlp, deadline_s=60, cache=cluster.run.cache, own_cache=True)
    yield made
    made.driver.close()


@pytest.fixture
def pipeline(shared_pipeline: RemotePipeline) -> RemotePipeline:
    """The pipeline of the whole file, loaded again where a test has closed it: they run in any order."""
    if not runs(shared_pipeline):
        shared_pipeline.load()
    return shared_pipeline


def runs(pipeline: RemotePipeline) -> bool:
    try:
        return bool(pipeline.driver.session)
    except AutoparError:
        return False


def test_the_cluster_is_one_to_plan_with(cluster: RayCluster) -> None:
    assert cluster.num_nodes == 2
    assert cluster.num_devices == 4
    assert Cluster.from_json(cluster.to_json()).groups == cluster.groups


@pytest.mark.slow
def test_training_is_that_of_one_device(mlp: Example, pipeline: RemotePipeline) -> None:
    assert furthest(trained(mlp, pipeline, 3), trained_plain(mlp, 3)) < 1e-5


@pytest.mark.slow
def test_logs_that_ray_shows_lie_in_its_own_folder(cluster: RayCluster) -> None:
    """libtpu of any program writes into /tmp/tpu_logs, and Ray would show it."""
    import ray

    node = ray._private.worker.global_worker.node
    logs, folder = Path(node.get_logs_dir_path()), Path(node.get_temp_dir_path()).parent
    shown = [p for p in logs.iterdir() if not p.resolve().is_relative_to(folder.resolve())]
    assert shown == []
    assert (logs / "tpu_logs").resolve() == (folder / "tpu_logs").resolve()
    assert "TPU_LOG_DIR" not in os.environ


def test_nothing_listens_on_other_than_loopback(pipeline: RemotePipeline) -> None:
    mine = psutil.Process()
    addresses: set[str] = set()
    for process in [mine, *mine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived child has ended since, and listens no more
            connections = process.net_connections("inet")
            addresses.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)
    assert addresses
    assert {a.removeprefix("::ffff:") for a in addresses} <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_who_wants_all_addresses_starts_ray_himself() -> None:
    command = "import autopar; autopar.Cluster.ray(workers=1, devices_per_worker=1)"
    here = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    made = subprocess.run([sys.executable, "-c", command], env=here, capture_output=True, text=True)
    assert made.returncode == 1
    assert "Ray would listen on all addresses" in made.stderr
    assert "set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in made.stderr


def test_another_user_enters_no_folder_and_changes_no_program(cluster: RayCluster, pipeline: RemotePipeline) -> None:
    """All that Ray and workers write lies below one folder of this user; Ray's own, inside, is open to all."""
    programs = Path(cluster.run.cache)
    assert stat.S_IMODE(programs.stat().st_mode) == stat.S_IMODE(programs.parent.stat().st_mode) == 0o700
    assert any(programs.iterdir())
    assert Path(ray_folder()).is_relative_to(programs.parent)
    token = programs.parent / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token)
    if os.geteuid() == 0:
        look = f"import os; os.setuid(65534); os.listdir({str(programs.parent / 'r')!r})"
        assert "PermissionError" in subprocess.run([sys.executable, "-Ic", look], capture_output=True, text=True).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_reaches_no_file_socket_or_port(cluster: RayCluster, pipeline: RemotePipeline) -> None:
    """As nobody: files, shared memory, sockets and processes, and each port of the driver and its children."""
    mine = psutil.Process()
    ports: set[int] = set()
    for process in [mine, *mine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            ports.update(c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
    folder = Path(cluster.run.cache).parent
    files = [p for p in folder.rglob("*") if not p.is_symlink()]
    assert len(ports) > 5 and any(p.is_socket() for p in files) and any(p.suffix == ".log" for p in files)
    told = json.dumps({"files": [str(p) for p in files], "ports": sorted(ports), "processes": list(cluster.processes)})
    done = subprocess.run([sys.executable, "-Ic", AS_NOBODY], input=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    # What was said to the ports disturbed nobody.
    assert kept(pipeline)


# Says what it could do: nothing is expected. A port may take a connection; it must not answer what a stranger asks.
AS_NOBODY = r"""
import encodings.idna, json, os, socket, sys
told = json.load(sys.stdin)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
could = []
for path in told["files"]:
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, mode | os.O_NONBLOCK))
            could.append(["open", path, mode])
        except OSError:
            pass
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
            could.append(["connect", path])
    except OSError:
        pass
for name in os.listdir("/dev/shm"):
    if "plasma" in name or "ray" in name:
        try:
            os.close(os.open("/dev/shm/" + name, os.O_RDWR))
            could.append(["shm", name])
        except OSError:
            pass
for process in told["processes"]:
    for name in ("mem", "environ", "fd"):
        try:
            (os.listdir if name == "fd" else open)(f"/proc/{process}/{name}")
            could.append([name, process])
        except OSError:
            pass
    try:
        os.kill(process, 0)
        could.append(["kill", process])
    except OSError:
        pass
# What Ray's HTTP services answer, and 16 bytes in place of a secret. gRPC without the token is a test of its own.
asks = [
    b"GET /api/actors HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /get_or_create_runtime_env HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"f" * 16 + b"\0" * 12,
]
for port in told["ports"]:
    for ask in asks:
        try:
            with socket.socket() as s:
                s.settimeout(0.5)
                s.connect(("127.0.0.1", port))
                s.sendall(ask)
                said = b""
                try:
                    while len(said) < 4096 and (part := s.recv(4096)):
                        said += part
                except TimeoutError:
                    pass
            if said.startswith(b"HTTP/1.1 200") or (said and not said.startswith((b"HTTP/1", b"\0\0"))):
                could.append(["ask", port, said[:80].decode("latin-1")])
        except OSError:
            pass
print(json.dumps(could))
"""


@pytest.mark.slow
def test_without_the_token_ray_takes_no_command(cluster: RayCluster, pipeline: RemotePipeline) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = f"import ray; ray.init({address!r}, log_to_driver=False); print(ray.nodes())"
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    for told in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}):
        made = subprocess.run([sys.executable, "-c", command], env={**hidden, **told}, capture_output=True, text=True)
        assert made.returncode != 0
        assert "NodeID" not in made.stdout


def ray_folder() -> str:
    import ray

    return str(ray._private.worker.global_worker.node.get_session_dir_path())


def test_a_ray_that_knows_no_tokens_is_refused(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    from autopar.runtime.ray import connect

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    with pytest.raises(ClusterError, match="takes commands from every user"):
        connect._require_token(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    connect._require_token(str(tmp_path))  # the user says that it may do without


def test_a_stage_of_two_processes_trains_as_one_device(cluster: RayCluster) -> None:
    """The first stage is a session of two processes, the second one process: pieces go from one to the other.

    The state has a typed key, of which each step takes a new one: put, stepped and fetched on two processes.
    """
    fn, (state, batch) = mlp_module.build("tiny", layers=4, hidden=16, batch=8)

    def step(keyed: Any, batch: Any) -> Any:
        key, use = jax.random.split(keyed["key"])
        noise = jax.random.normal(use, batch["x"].shape[1:]) * 0.1
        state, metrics = fn(keyed["state"], {**batch, "x": batch["x"] + noise})
        return {"state": state, "key": key}, metrics

    made = example_of(step, ({"state": state, "key": jax.random.key(3)}, batch), 2)
    own = started(cluster, made, (1, 1, 2), (2, 1), deadline_s=60)
    try:
        assert len(own.driver.session.worker_group.processes) == 3
        assert furthest(trained(made, own, 2), trained_plain(made, 2)) < 1e-5
        placed = own.put(dict(enumerate(made.leaves)))
        leaves = [placed.get(n, leaf) for n, leaf in enumerate(made.leaves)]
        assert furthest(own.step(leaves), trained_plain(made, 1)) < 1e-5
        os.kill(own.driver.session.worker_group.processes[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"worker 0, host \d \(stage 0\)"):
            own.step(leaves)
    finally:
        own.driver.close()


def test_arrays_are_pulled_from_device_to_device(cluster: RayCluster, mlp: Example, pipeline: RemotePipeline) -> None:
    """Also by and from a stage of two processes; a worker that is killed while others wait for it is replaced."""
    want = bits(trained(mlp, pipeline, 3))
    own = started(cluster, mlp, deadline_s=8, recover=True, copy_every=2, transport="direct")
    try:
        leaves = list(mlp.leaves)
        for step in range(3):
            if step == 1:
                thread = strike(own, 0, signal.SIGKILL, step, 2)
            got = own.step(leaves)
            leaves = [*got[: mlp.state], *leaves[mlp.state :]]
        thread.join(30)
        assert own.driver.recoveries >= 1
        assert bits(got) == want
    finally:
        own.driver.close()
    several = started(cluster, mlp, (1, 1, 2), (2, 1), deadline_s=60, transport="direct")
    try:
        assert furthest(several.step(list(mlp.leaves)), trained_plain(mlp, 1)) < 1e-5
    finally:
        several.driver.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "127.0.0.1:1"}, "nothing answers at 127.0.0.1:1"),
        ({"attempts": 0}, "attempts=0 is no count"),
        ({"start_s": -1.0}, "start_s=-1.0 is no time"),
        ({"start_s": 0}, "start_s=0 is no time"),
        ({"backoff_s": -0.5}, r"backoff_s=-0.5 is no time(.|\n)*0 or more"),
        ({"copy_every": 0}, "copy_every=0 is no count"),
        ({"object_store_bytes": 1.5e9}, "object_store_bytes=1500000000.0 is no count"),
        ({"deadline_s": float("inf")}, "deadline_s=inf is no time"),
    ],
)
def test_wrong_addresses_and_options_are_told_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        Cluster.ray(**options)


def test_what_ray_is_asked_for_is_passed_on() -> None:
    slot = Slot(2, "cuda", "GPU", custom=(("fast", 0.5),), labels=(("zone", "a"),))
    assert slot.bundle == {"CPU": 1.0, "GPU": 2.0, "fast": 0.5}
    assert slot.resources == {
        "num_cpus": 1, "num_gpus": 2, "resources": {"fast": 0.5}, "label_selector": {"zone": "a"}
    }  # fmt: skip


def test_a_transport_that_is_not_known_is_told() -> None:
    with pytest.raises(ClusterError, match=r"transport='pigeon'.*\n.*auto, sockets, direct"):
        Cluster.ray(transport="pigeon")


@pytest.mark.slow
@pytest.mark.parametrize("table", ["gpipe", "1f1b"])
def test_training_gpt_is_that_of_one_device(cluster: RayCluster, shared_pipeline: RemotePipeline, table: str) -> None:
    shared_pipeline.driver.end_session()  # its workers' places
    with jax.enable_x64(True):
        gpt = example("gpt", 2, microbatches=4, table=table, dtype="float64")
        own = started(cluster, gpt, deadline_s=60)
        try:
            assert furthest(trained(gpt, own, 3), trained_plain(gpt, 3)) < 1e-9
        finally:
            own.driver.close()


def strike(pipeline: RemotePipeline, worker: int, kind: signal.Signals, step: int, index: int) -> threading.Thread:
    """Sends a signal to a worker as soon as it reports an instruction of a step."""
    cluster_processes = pipeline.driver.session.worker_group.processes

    def watch() -> None:
        while runs(pipeline) and pipeline.driver.session.monitor.last(worker) < (step, index):
            time.sleep(0.0005)
        os.kill(cluster_processes[worker], kind)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def bits(results: list[Any]) -> list[bytes]:
    return [numbers(r).tobytes() for r in results]


def strike_next(cluster: RayCluster, worker: int, kind: signal.Signals) -> threading.Thread:
    """Sends a signal to a worker of the next worker_group, when it has started and begins to load."""
    before = cluster.processes

    def watch() -> None:
        while cluster.processes == before:
            time.sleep(0.0005)
        os.kill(cluster.processes[worker], kind)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_workers_that_are_killed_or_stopped_change_no_bit(
    cluster: RayCluster, mlp: Example, pipeline: RemotePipeline, tmp_path: Path
) -> None:
    """Killed in a step, killed while its successor loads, and stopped while a checkpoint is written."""
    want = bits(trained(mlp, pipeline, 4))
    own = started(
        cluster, mlp, deadline_s=4, load_s=60, recover=True, copy_every=2, cache=cluster.run.cache, own_cache=True
    )
    checkpoints = Checkpoints(tmp_path)
    try:
        first = own.driver.session.worker_group.processes
        leaves, threads = list(mlp.leaves), []
        for step in range(4):
            if step == 1:
                threads = [strike(own, 1, signal.SIGKILL, step, 2), strike_next(cluster, 0, signal.SIGKILL)]
            if step == 3:
                os.kill(own.driver.session.worker_group.processes[0], signal.SIGSTOP)
                # It waits for the stopped worker, and is begun again when that was replaced.
                checkpoints.save(step, leaves[: mlp.state], wait=False)
                saved = [numbers(x) for x in leaves[: mlp.state]]
            got = own.step(leaves)
            leaves = [*got[: mlp.state], *leaves[mlp.state :]]
        for thread in threads:
            thread.join(30)
        assert own.driver.recoveries >= 3
        assert bits(got) == want
        checkpoints.wait()
        restored = checkpoints.restore([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved])
        assert [np.asarray(x).tobytes() for x in restored] == [x.tobytes() for x in saved]
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
        last = own.driver.session.worker_group.processes
    finally:
        own.driver.close()
    assert not any(exists(p) for p in (*first, *last))


def test_a_worker_that_gets_sigterm_tells_the_driver_and_ends_with_143(
    cluster: RayCluster, mlp: Example, capfd: pytest.CaptureFixture[str]
) -> None:
    """It goes on until the driver has what it needs: no step is run again; then it ends by itself, without a trace."""
    own = started(cluster, mlp, deadline_s=60, recover=True, copy_every=100, cache=cluster.run.cache, own_cache=True)
    try:
        want = trained_plain(mlp, 3)
        leaves = list(mlp.leaves)
        first = own.driver.session.worker_group.processes
        for step in range(3):
            if step == 1:
                os.kill(first[0], signal.SIGTERM)
                until = time.monotonic() + 30
                while not own.driver.is_ending and time.monotonic() < until:
                    time.sleep(0.01)
                assert own.driver.is_ending
                assert exists(first[0])
            got = own.step(leaves)
            leaves = [*got[: mlp.state], *leaves[mlp.state :]]
        assert furthest(got, want) < 1e-5
        assert own.driver.recoveries == 0
        assert not any(exists(p) for p in first)
        assert "SIGTERM received" not in capfd.readouterr().err
    finally:
        own.driver.close()


def test_room_is_set_aside_for_all_workers_or_none(cluster: RayCluster) -> None:
    from autopar.runtime.ray.actors import Placement  # not before Ray was started

    slot = dataclasses.replace(cluster.slots[0], shared=False)
    room = Placement([slot] * 2, machines=1, timeout_s=30)
    assert room.options(1, slot)["num_cpus"] == 1
    with pytest.raises(ClusterError, match="no room for 1 workers"):
        Placement([slot], machines=1, timeout_s=0.2)
    room.close()
    with pytest.raises(ClusterError, match="no room for 3 workers"):
        Placement([slot] * 3, machines=1, timeout_s=0.2)


def test_without_recovery_a_lost_worker_is_named(cluster: RayCluster, mlp: Example) -> None:
    own = started(cluster, mlp, deadline_s=30, cache=cluster.run.cache, own_cache=True)
    try:
        trained(mlp, own, 1)
        os.kill(own.driver.session.worker_group.processes[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"worker 1 \(stage 1\).*its process ended") as caught:
            trained(mlp, own, 1)
        assert (caught.value.worker, caught.value.stages) == (1, (1,))
    finally:
        own.driver.close()


def test_parallelize_runs_on_the_cluster(cluster: RayCluster) -> None:
    build = mlp_module.build
    step, (state, batch) = build("tiny", layers=2, hidden=16, batch=8)
    function = autopar.parallelize(step, cluster=cluster, num_microbatches=2)
    compiled = function.compile(state, batch)
    made = function.init(lambda: build("tiny", layers=2, hidden=16, batch=8)[1][0])
    assert all(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(made))
    assert furthest(jax.tree.leaves(made), [np.asarray(x) for x in jax.tree.leaves(state)]) < 1e-6
    state = function.shard(state, batch)[0]
    plain = jax.jit(step)
    want = build("tiny", layers=2, hidden=16, batch=8)[1][0]
    for _ in range(3):
        state, metrics = compiled(state, batch)
        want, expected = plain(want, batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert isinstance(jax.tree.leaves(state)[0], RemoteArray)
    assert furthest(jax.tree.leaves(state), [np.asarray(x) for x in jax.tree.leaves(want)]) < 1e-5
    assert "HloModule" in compiled.as_text()
    compiled.local.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_random_strikes_change_no_bit(
    cluster: RayCluster, mlp: Example, pipeline: RemotePipeline, tmp_path: Path
) -> None:
    """Killed or stopped, any worker, any moment: of steps, copies and checkpoints, and while replaced workers load."""
    steps, draw = 60, random.Random(0)
    want = bits(trained(mlp, pipeline, steps))
    own = started(
        cluster,
        mlp,
        deadline_s=2,
        start_s=30,
        load_s=20,
        recover=True,
        copy_every=3,
        attempts=40,
        cache=cluster.run.cache,
    )
    struck: list[signal.Signals] = []
    over = threading.Event()

    def strikes() -> None:
        while len(struck) < 50 and not over.wait(draw.uniform(0.05, 4)):
            processes = cluster.processes
            if processes:
                kind = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(processes), kind)
                    struck.append(kind)

    thread = threading.Thread(target=strikes, daemon=True)
    thread.start()
    checkpoints = Checkpoints(tmp_path)
    seen: set[int] = set()
    try:
        leaves, got = list(mlp.leaves), []
        for step in range(steps):
            time.sleep(2.0 if len(struck) < 50 else 0)
            if step % 4 == 3:
                checkpoints.save(step, leaves[: mlp.state], wait=False)
            got = own.step(leaves)
            leaves = [*got[: mlp.state], *leaves[mlp.state :]]
            seen.update(cluster.processes)
        over.set()
        assert bits(got) == want
        assert own.driver.recoveries >= 10
        checkpoints.save(steps, leaves[: mlp.state])
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves[: mlp.state]]
        assert [np.asarray(x).tobytes() for x in checkpoints.restore(shapes)] == want[: mlp.state]
        assert checkpoints.steps == (steps - 5, steps - 1, steps)
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        over.set()
        own.driver.close()
    assert not any(exists(p) for p in seen)


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


# What runs in the background of a shell is started with SIGINT ignored, and so are its children.
DRIVER = """
import signal, tempfile, time, autopar
signal.signal(signal.SIGINT, signal.default_int_handler)
cluster = autopar.Cluster.ray(workers=1, devices_per_worker=1)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_driver_that_is_killed_leaves_nothing(short_path: Path, kind: signal.Signals) -> None:
    home = short_path / "home"
    home.mkdir()
    hidden = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_AUTH", "RAY_ENABLE"))}
    paths = {"TMPDIR": str(short_path), "HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    here = {**hidden, **paths}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stderr is not None
    assert driver.stdout.readline() == "ready\n"
    started = psutil.Process(driver.pid).children(recursive=True)
    assert len(started) > 3
    driver.send_signal(kind)
    driver.wait(30)
    told = driver.stderr.read()
    driver.stderr.close()
    driver.stdout.close()
    if kind == signal.SIGTERM:  # without the trace of an abort
        assert driver.returncode == 128 + kind
        assert "SIGTERM received" not in told
    _, left = psutil.wait_procs(started, timeout=30)
    assert left == []
    until = time.monotonic() + 10
    while list(short_path.iterdir()) != [home] and time.monotonic() < until:
        time.sleep(0.05)
    assert list(short_path.iterdir()) == [home]
    assert list(home.iterdir()) == []
