"""What the processes of these tests run: `python -m tests.runtime_hosts.programs NAME OPTIONS`, options as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import zlib
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.experimental.multihost_utils
import numpy as np

import autopar
from autopar.cluster import Link, LogicalMesh
from autopar.lower.reshard import apply_steps
from autopar.runtime.interpreter import Worker
from autopar.sharding.reshard import ReshardStep

STEPS = 5


def join(o: dict[str, Any]) -> None:
    jax.config.update("jax_num_cpu_devices", o["devices"])
    jax.config.update("jax_enable_x64", True)
    if o.get("initialize"):
        autopar.initialize(f"127.0.0.1:{o['port']}", o["processes"], o["process"])
    elif o["processes"] > 1 or o.get("gloo"):  # one process can have the collectives of several
        at = f"127.0.0.1:{o['port']}"
        jax.distributed.initialize(
            at, o["processes"], o["process"], coordinator_bind_address=at, cluster_detection_method="deactivate",
            initialization_timeout=60, heartbeat_timeout_seconds=o.get("heartbeat_s", 100),
        )  # fmt: skip


#: Sizes of the examples: as small as still has two layers of each kind, in float64.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 4, "hidden": 16},
    "gpt": {"layers": 2, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16},
    "llama": {"layers": 2, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16},
    "moe": {"layers": 2, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16},
    "wide_resnet": {},
    "encoder_decoder": {},
}
#: Modules of models that are no examples.
MODELS = {"encoder_decoder": "tests.runtime_hosts.encoder_decoder"}


def example(name: str, more: dict[str, Any]) -> tuple[Any, Any]:
    module = import_module(MODELS.get(name, f"examples.{name}"))
    step, args = module.build("tiny", **{"dtype": "float64", **SIZES[name], **more})
    return step, args


def digest(tree: Any) -> list[list[Any]]:
    """For every leaf its norm, and a checksum of what of it lies on this process first."""
    found = []
    for leaf in jax.tree.leaves(tree):
        data = np.ascontiguousarray(np.asarray(local(leaf), np.float64))
        found.append([float(np.linalg.norm(data)), zlib.crc32(data.tobytes())])
    return found


def local(leaf: Any) -> Any:
    """All of an array, however it lies."""
    from autopar.runtime.hosts.arrays import whole

    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return whole(leaf)


def train(o: dict[str, Any]) -> Any:
    """Steps of an example, plain and by several plans: of each the largest difference, and what all leaves are."""
    step, args = example(o["example"], o.get("sizes", {}))
    args = jax.tree.map(lambda x: np.asarray(x) if x.dtype.kind in "fiub" else x, args)
    with jax.default_device(jax.local_devices()[0]):
        plain = args[0]
        jitted = jax.jit(step)
        for _ in range(STEPS):
            plain, want = jitted(plain, *args[1:])
    more = {"nodes": o["nodes"]} if "nodes" in o else {}
    return [trained(step, args, (plain, want), case | more) for case in o["cases"]]


def scatters(o: dict[str, Any]) -> Any:
    """Shards of sums, as a plan's step makes them and as a user's collective does: by way the calls that are wrong."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    every = jax.P(("x", "y"))
    logical = LogicalMesh((("x", 4), ("y", 2)), (Link(1e9, 0.0),) * 2)
    step = ReshardStep("reduce-scatter", ("y",), 1)

    @partial(jax.shard_map, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    def planned(x: Any) -> Any:
        return apply_steps([step], x, logical), jax.lax.psum(x, "y")

    @partial(jax.shard_map, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    def written(x: Any) -> Any:
        return jax.lax.psum_scatter(x, "y", scatter_dimension=1, tiled=True), jax.lax.psum(x, "y")

    wrong = {"planned": 0, "written": 0}
    for elements in o["elements"]:  # of 8 bytes; what a socket takes at once grows with what it has sent
        terms = np.random.default_rng(0).normal(size=(8, elements))
        placed = jax.make_array_from_callback(terms.shape, jax.NamedSharding(mesh, every), terms.__getitem__)
        want = terms.reshape(4, 2, -1).sum(1).reshape(8, -1)
        for name, call in {"planned": jax.jit(planned), "written": autopar.parallelize(written)}.items():
            for _ in range(o["calls"]):
                shards = jax.block_until_ready(call(placed))[0].addressable_shards
                wrong[name] += any(not np.allclose(s.data, want[s.index], 1e-12, 1e-12) for s in shards)
    return wrong


def several(o: dict[str, Any]) -> Any:
    """Several programs in the same processes, one behind the other."""
    return [globals()[name]({**o, **options}) for name, options in o["programs"]]


def farthest(tree: Any, want: Any) -> float:
    """The largest difference of two trees, of numbers above 1 as a share of the largest."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(local(a), np.float64), np.asarray(local(b), np.float64)
        worst = max(worst, float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) if a.size else 0.0)
    return worst


def in_nodes(count: int) -> autopar.Cluster:
    """The devices of this process, planned for as those of ``count`` processes, whose links have other prices."""
    cluster = autopar.Cluster.local(figures="list")
    (group,) = cluster.groups
    each = group.devices_per_node // count
    return autopar.Cluster(cluster.name, (dataclasses.replace(group, count=count, devices_per_node=each),))


def trained(step: Any, args: Any, want: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Steps of a plan: options of `parallelize` as ``case``."""
    case = dict(case)
    if "manual" in case:
        case["search"] = autopar.search.Manual(**case.pop("manual"))
    if "nodes" in case:
        case["cluster"] = in_nodes(case.pop("nodes"))
    parallel = autopar.parallelize(step, **case)
    state, batch = args[0], args[1:]
    for _ in range(STEPS):
        state, metrics = parallel(state, *batch)
    plan = parallel.compile(args[0], *batch).plan
    worst = farthest((state, metrics), want)
    leaves = jax.tree.leaves(state)
    return {
        "worst": worst,
        "digest": digest((state, metrics)),
        "split": sum(not leaf.is_fully_replicated for leaf in leaves),
        "mesh": list(plan.stages[0].mesh_shape.values()),
        "stages": plan.num_stages,
        "processes": [len({d.process_index for d in leaf.sharding.device_set}) for leaf in leaves],
        "plan": zlib.crc32(plan.to_json().encode()),
        "loss": float(np.asarray(metrics["loss"])),
    }


def two_stages(o: dict[str, Any]) -> Any:
    """A step of two layers on a stage each, next to the same by numpy: little is compiled.

    The batch is in parts, of which the process of the second stage has no examples.
    """
    x = np.random.default_rng(0).normal(size=(16, 64)) / 64
    draw = np.random.default_rng(1)
    w = {"a": draw.normal(size=(64, 128)), "b": draw.normal(size=(128, 64))}
    options = {"search": autopar.search.Manual(dp=1, pp=2), "num_microbatches": 2}  # the search says the stages
    step = autopar.parallelize(dense_step, schedule="1f1b", **options)
    step.compile(w, x)
    examples = list(step.process_examples())
    state, loss = step(w, step.local_batch(x[examples]))
    hidden = x @ w["a"]
    out = hidden @ w["b"]
    slope = 2 * out / out.size
    want = {"a": w["a"] - 0.1 * x.T @ (slope @ w["b"].T), "b": w["b"] - 0.1 * hidden.T @ slope}
    here = {n: leaf for n, leaf in state.items() if leaf.sharding.addressable_devices}
    worst = max(float(np.abs(np.asarray(leaf) - want[n]).max()) for n, leaf in here.items())
    apart = abs(float(loss) - float((out**2).mean()))
    return {"worst": max(worst, apart), "here": sorted(here), "examples": len(examples)}


def dense_step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return ((x @ w["a"] @ w["b"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def dense_state(key: Any) -> Any:
    one, two = jax.random.split(key)
    return {"a": jax.random.normal(one, (64, 128), np.float64), "b": jax.random.normal(two, (128, 64), np.float64)}


def everything(o: dict[str, Any]) -> Any:
    """All ways of calling, of a step whose parameters have to be split."""
    cluster = autopar.Cluster.local()
    x = np.random.default_rng(0).normal(size=(16, 64))
    step = autopar.parallelize(dense_step, memory_limit=o["limit"], donate_argnums=0)
    compiled = step.compile(jax.eval_shape(dense_state, jax.random.key(0)), x)
    state = step.init(dense_state, jax.random.key(0))
    given = [str(leaf.sharding.spec) for leaf in jax.tree.leaves(state)]
    (sharded, _) = step.shard(jax.tree.map(local, state), x)
    same = all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(sharded), strict=True))
    pieces = max(leaf.addressable_shards[0].data.size / leaf.size for leaf in jax.tree.leaves(state))
    whole = max(sum(s.data.size for s in leaf.addressable_shards) / leaf.size for leaf in jax.tree.leaves(state))
    want = jax.tree.map(local, state)
    for _ in range(2):
        state, loss = step(state, x)
        want, plain = jax.jit(dense_step)(want, x)
    report = autopar.check(dense_step, jax.tree.map(local, state), x, memory_limit=o["limit"])
    measured = autopar.measure(step, state, x, repeats=2)
    path = o["path"]
    if o["process"] == 0:
        compiled.plan.save(path)
    jax.experimental.multihost_utils.sync_global_devices("saved")
    loaded = autopar.parallelize(dense_step, plan=autopar.Plan.load(path))
    again, _ = loaded(jax.tree.map(local, state), x)
    more, _ = autopar.parallelize(dense_step, memory_limit=o["limit"])(state, x)
    return {
        "cluster": [cluster.name, cluster.num_nodes, cluster.num_devices],
        "specs": given,
        "same": same,
        "pieces": pieces,
        "whole": whole,
        "apart": float(max(np.abs(local(a) - b).max() for a, b in zip(state.values(), want.values(), strict=True))),
        "loss": [float(loss), float(plain)],
        "check": [report.ok, report.max_difference],
        "steps": len(measured.seconds),
        "plan": zlib.crc32(compiled.plan.to_json().encode()),
        "loaded": digest(again) == digest(more),
        "digest": digest(state),
    }


def data(o: dict[str, Any]) -> Any:
    """A batch in parts is the batch whole; a ragged one is an error everywhere; parts that disagree are one."""
    x = np.random.default_rng(o.get("seed", 0)).normal(size=(o.get("batch", 16), 64))
    state = {"a": np.ones((64, 128)), "b": np.ones((128, 64))}
    step = autopar.parallelize(dense_step, mesh_shape=o["mesh"], memory_limit=o.get("limit"))
    each = len(x) // o["processes"]
    early = step.local_batch({"x": x[each * o["process"] :][:each]})["x"]
    step.compile(state, x)
    rows = list(step.process_examples())
    batch = step.local_batch(x[rows])
    whole = step(state, x)
    parts = step(state, batch)
    other = o["process"] == o["processes"] - 1
    found = {
        "rows": rows,
        "early": bool(np.array_equal(local(early), x)),
        "batch": bool(np.array_equal(local(batch), x)),
        "equal": digest(whole) == digest(parts),
        "plan": zlib.crc32(step.compile(state, x).plan.to_json().encode()),
        "lies": batch.sharding == step.shard(state, x)[1].sharding,
    }
    wrong = {
        "ragged": lambda: step.local_batch(x[rows[: len(rows) - other]]),
        "all ragged": lambda: step.local_batch(x[rows[:-1]]),
        "dtype": lambda: step.local_batch(x[rows].astype(np.float32 if other else np.float64)),
        "values": lambda: step.local_batch(x[rows] + other),
    }
    for name, call in wrong.items():
        try:
            call()
            found[name] = ["", ""]
        except autopar.AutoparError as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def checkpoints(o: dict[str, Any]) -> Any:
    """Trains from a checkpoint, where there is one, and saves; what the state is before and after."""
    x = np.random.default_rng(0).normal(size=(16, 64)) / 64
    step = autopar.parallelize(dense_step, memory_limit=o.get("limit"), mesh_shape=o.get("mesh"), donate_argnums=0)
    step.compile(jax.eval_shape(dense_state, jax.random.key(0)), x)
    state = step.restore(o["path"]) if o["restore"] else step.init(dense_state, jax.random.key(0))
    wanted = step.shard(jax.tree.map(local, state), x)[0]
    lies = all(a.sharding == b.sharding for a, b in zip(state.values(), wanted.values(), strict=True))
    before = digest(state)
    for at in range(o["steps"]):
        state, _ = step(state, x)
        saved = [step.save(o["path"], state, keep=2), digest(state)]
        if at == o["steps"] - 1:
            state, _ = step(state, x)  # what was saved is not what comes behind it
    step.wait_until_saved()
    return {"before": before, "saved": saved, "lies": lies}


def flax_checkpoint(o: dict[str, Any]) -> Any:
    """Goes on from a checkpoint that plain Flax code wrote, and saves: the loss, and how the state is split."""
    case = import_module("tests.runtime_hosts.flax_case")
    step = autopar.parallelize(case.step, search="zero3")
    state = step.restore(o["theirs"], like=jax.eval_shape(case.state))
    for _ in range(case.STEPS):
        state, loss = step(state, case.batch(o["batch"]))
    step.save(o["ours"], state, at=2, wait=True)
    return {"loss": float(loss), "split": not state.params["w"].is_fully_replicated, "digest": digest(state)}


def plain_orbax(o: dict[str, Any]) -> Any:
    """What Orbax itself says of a stage's state: an array on the devices of process 0, next to one on all devices."""
    import orbax.checkpoint as ocp

    here, everywhere = jax.devices()[: o["devices"]], jax.devices()
    tree = {}
    for name, devices in (("stage", here), ("all", everywhere)):
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        lies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        tree[name] = jax.make_array_from_callback((8,), lies, lambda index: np.arange(8.0)[index], dtype=float)
    try:
        with ocp.StandardCheckpointer() as saver:
            saver.save(o["path"], tree)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def far(o: dict[str, Any]) -> Any:
    """A checksum of a plan for 512 hosts, made by one process while the others do nothing."""
    jax.devices()  # jax's first look at devices waits for all processes
    if o["process"] != o["processes"] - 1:
        return 0
    cluster = autopar.Cluster.load("dgx-a100", nodes=512)
    shapes = jax.eval_shape(dense_state, jax.random.key(0)), jax.ShapeDtypeStruct((8192, 64), np.float64)
    plan = autopar.parallelize(dense_step, cluster=cluster, num_stages=1).plan(*shapes)
    return [plan.stages[0].mesh_shape["x"] * plan.stages[0].mesh_shape["y"], zlib.crc32(plan.to_json().encode())]


def pipelines(o: dict[str, Any]) -> Any:
    """A pipeline with a stage a process: init, measure, a checkpoint, and batches in parts."""
    x = np.random.default_rng(0).normal(size=(16, 64)) / 64
    options = {"search": autopar.search.Manual(dp=4, pp=2), "num_stages": 2, "num_microbatches": 2}
    step = autopar.parallelize(dense_step, **options)
    compiled = step.compile(jax.eval_shape(dense_state, jax.random.key(0)), x)
    state = step.init(dense_state, jax.random.key(0))
    want = dense_state(jax.random.key(0))
    for _ in range(2):
        state, loss = step(state, x)
        want, plain = jax.jit(dense_step)(want, x)
    pairs = zip(state.values(), want.values(), strict=True)
    apart = max(float(np.abs(local(a) - np.asarray(b)).max()) for a, b in pairs)
    found = {"stages": compiled.plan.num_stages, "apart": max(apart, abs(float(loss) - float(plain)))}
    found["measured"] = len(autopar.measure(step, state, x, repeats=2).seconds)
    here = [len(leaf.addressable_shards) for leaf in jax.tree.leaves(state)]
    before = digest(state)
    step.save(o["path"], state, at=3, wait=True)
    back = step.restore(o["path"])
    again = autopar.parallelize(dense_step, mesh_shape=[8])
    again.compile(jax.eval_shape(dense_state, jax.random.key(0)), x)
    found["restored"] = digest(back) == before
    found["one stage"] = digest(again.restore(o["path"])) == before
    given = autopar.parallelize(dense_step, plan=compiled.plan)
    made = given.init(dense_state, jax.random.key(0))  # on stages of single processes before the first call
    found["given plan"] = digest(given(made, x)) == digest(step(made, x))
    rows = list(step.process_examples())
    placed = step.local_batch(x[rows])
    one, two = step(back, placed), step(back, x)
    found["verified"], found["simulated"] = "", autopar.simulate(compiled.plan).step_time
    if o["process"] == 0:  # compiled in a process of its own, stage by stage
        verification = autopar.verify(compiled.plan, dense_step, want, x, target="cpu:8")
        found["verified"] = [s.collectives_ok for s in verification.stages]
    return {**found, "parts": digest(one) == digest(two), "here": here}


def slow_network(o: dict[str, Any]) -> Any:
    """Steps of a function with a free number of stages, for accelerators on nodes that are joined slowly or fast."""
    step, args = example("mlp", {"layers": 8, "hidden": 64, "batch": 16})
    args = jax.tree.map(np.asarray, args)
    group = autopar.Cluster.load("dgx-a100", nodes=2).groups[0]
    found = {}
    for name, bandwidth in (("slow", 1e7), ("fast", group.intra.bandwidth)):
        inter = dataclasses.replace(group.inter, bandwidth=bandwidth, node_bandwidth=None, latency_s=1e-6)
        group = dataclasses.replace(group, count=o["processes"], devices_per_node=o["devices"], inter=inter)
        cluster = autopar.Cluster(name, (group,))
        parallel = autopar.parallelize(step, cluster=cluster, num_microbatches=4)
        state, plain = args[0], args[0]
        for _ in range(2):
            state, _ = parallel(state, *args[1:])
            plain, _ = jax.jit(step)(plain, *args[1:])
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True)
        apart = max(float(np.abs(local(a) - np.asarray(b)).max()) for a, b in pairs)
        plan = parallel.compile(*args).plan
        found[name] = {"stages": plan.num_stages, "close": apart < 1e-10, "plan": zlib.crc32(plan.to_json().encode())}
    parallel = autopar.parallelize(step, num_microbatches=4)
    return {**found, "CPUs": parallel.compile(*args).plan.num_stages}


def slow_callback(o: dict[str, Any]) -> Any:
    """Two steps; the first callback takes longer than connections may take to open."""
    calls = []

    def slow(v: Any) -> Any:
        calls.append(time.sleep(0 if calls else o["takes_s"]))
        return np.asarray(v) * 2

    def step(ws: Any, x: Any) -> Any:
        x = jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ ws[0])
        for w in ws[1:]:
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    ws, x = [np.eye(8) / 2] * 4, np.ones((8, 8))
    f = autopar.parallelize(step, search=autopar.search.Manual(**o["manual"]), **o["options"])
    values = [float(f(ws, x)) for _ in range(2)]
    hidden = 2 * x @ ws[0]
    for w in ws[1:]:
        hidden = np.tanh(hidden @ w)
    return {"right": bool(np.allclose(values, (hidden**2).mean())), "calls": len(calls)}


def failing_callbacks(o: dict[str, Any]) -> Any:
    """Steps by several plans; in the third the callbacks of one process raise, and the fourth is the second again.

    By plan, of each of the last three steps the loss, or the error.
    """
    return [_with_failing_callback(o, **case) for case in o["cases"]]


def _with_failing_callback(o: dict[str, Any], victim: int, kind: str, options: dict[str, Any]) -> Any:
    fails = [False]

    def call(v: Any) -> Any:
        if fails[0]:
            raise ValueError(f"mine of {kind}")
        return np.asarray(v) * 2

    @jax.custom_jvp
    def doubled(y: Any) -> Any:
        if kind == "pure":
            return jax.pure_callback(call, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        jax.debug.callback(call, y)
        return 2 * y

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0]))

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            y = x
            for w in ws:
                y = jax.numpy.tanh(y @ w) + doubled(w.sum())
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    ws, x = [np.eye(8) / 2] * 4, np.ones((8, 8))
    manual = options.pop("manual")
    f = autopar.parallelize(step, search=autopar.search.Manual(**manual), **options)
    state, _ = f(ws, x)
    found: list[Any] = []
    for at in range(3):
        fails[0] = at == 1 and o["process"] == victim
        try:
            found.append(float(f(state, x)[1]))
        except jax.errors.JaxRuntimeError as error:
            kinds = [type(error).__name__, type(error.__cause__).__name__]
            found.append(
                [*kinds, str(error).partition("Traceback")[0].splitlines()[0], getattr(error, "process", None)]
            )
    return found


def lose(o: dict[str, Any]) -> Any:
    """Steps without end, of which one process sees few."""
    x = np.ones((16, 64)) / 64
    step = autopar.parallelize(dense_step, mesh_shape=[8], memory_limit=60_000)
    state = step.init(dense_state, jax.random.key(0))
    for at in range(100_000):
        state, loss = step(state, x)
        float(loss)
        if at == 3 and o["process"] == o["victim"]:
            if o["how"] == "fails":
                raise ValueError("no more data")
            os.kill(os.getpid(), signal.SIGKILL)
    return "did not end"


def without_flush(o: dict[str, Any]) -> Any:
    """Calls of an example by a schedule without a flush, and the drain: what all leaves are after each call.

    With 2BW the drained parameters are also compared with those of one device that follows the delays.
    """
    step, args = example(o["example"], o["sizes"])
    args = jax.tree.map(lambda x: np.asarray(x) if x.dtype.kind in "fiub" else x, args)
    options = {k: o[k] for k in ("num_stages", "num_microbatches", "schedule")}
    if "nodes" in o:
        options["cluster"] = in_nodes(o["nodes"])
    parallel = autopar.parallelize(step, search=autopar.search.Manual(**o["manual"]), **options)
    state, found = args[0], []
    for number in range(STEPS):
        batch = args[1]
        if number == 2 and o["parts"]:
            mine = list(parallel.process_examples())
            batch = parallel.local_batch(jax.tree.map(lambda x, mine=mine: x[mine], args[1]))
        state, metrics = parallel(state, batch)
        found.append(digest((state.state, state.under_way, metrics)))
    drained = parallel.drain(state)
    again, _ = parallel(drained, args[1])
    worst = 0.0
    if o["schedule"] == "2bw":
        with jax.default_device(jax.local_devices()[0]):
            delayed = autopar.transforms.delayed(step)
            jitted, plain = jax.jit(delayed), delayed.init(args[0])
            for _ in range(STEPS):
                plain, _ = jitted(plain, args[1])
        worst = farthest(drained, delayed.drain(plain))
    return {"digests": [*found, digest(drained), digest(again.state)], "worst": worst}


def drawn_lists(o: dict[str, Any]) -> Any:
    """Drawn lists; see `tests.runtime_hosts.drawn_lists`."""
    return import_module("tests.runtime_hosts.drawn_lists").carried_out(o)


def lose_in_step(o: dict[str, Any]) -> Any:
    """Steps of a pipeline by lists, in the middle of one of which a process ends: others are at a send then."""
    x = np.random.default_rng(0).normal(size=(16, 64)) / 64
    options = {"search": autopar.search.Manual(dp=o["devices"], pp=o["processes"]), "num_stages": o["processes"]}
    step = autopar.parallelize(dense_step, num_microbatches=4, schedule="1f1b", **options)
    step.compile(jax.eval_shape(dense_state, jax.random.key(0)), x)
    state = step.init(dense_state, jax.random.key(0))
    state, loss = step(state, x)
    float(loss)
    carried_out, left = Worker.do, [o["instructions"]]

    def do(worker: Worker, instruction: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and o["process"] == o["victim"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return carried_out(worker, instruction)

    Worker.do = do  # type: ignore[method-assign]
    print("RESULT " + json.dumps("in the step"), flush=True)
    state, loss = step(state, x)
    return float(loss)


def alone(o: dict[str, Any]) -> Any:
    """The first of two processes, of which there is but one."""
    start = time.monotonic()
    try:
        autopar.initialize(o["coordinator"], 2, 0, join_s=o["join_s"])
    except autopar.AutoparError as error:
        return [type(error).__name__, time.monotonic() - start < 30]
    return ["", False]


def wrong_use(o: dict[str, Any]) -> Any:
    """The errors of processes that differ, one behind the other."""
    x = np.ones((16, 64))
    state = {"a": np.ones((64, 128)), "b": np.ones((128, 64))}
    other = o["process"] == o["processes"] - 1

    def different(w: Any, x: Any) -> Any:
        return jax.tree.map(jax.numpy.tanh if other else jax.numpy.sin, w), x.sum()

    def bad_values(scale: float) -> Any:
        return autopar.parallelize(dense_step)(state, x * scale)

    def one_version() -> Any:
        kept, autopar.__version__ = autopar.__version__, "7.7" if other else autopar.__version__
        try:
            return autopar.parallelize(dense_step)(state, x)
        finally:
            autopar.__version__ = kept

    calls = {
        "program": lambda: autopar.parallelize(different)(state, x),
        "shape": lambda: autopar.parallelize(dense_step)(state, x[: 8 if other else 16]),
        "option": lambda: autopar.parallelize(dense_step, num_microbatches=2 if other else 1)(state, x),
        "version": one_version,
        "values": lambda: bad_values(2.0 if other else 1.0),
        "init": lambda: autopar.parallelize(dense_step).init(dense_state, jax.random.key(int(other))),
        "infeasible": lambda: autopar.parallelize(dense_step, memory_limit=100)(state, x),
        "fine": lambda: autopar.parallelize(dense_step)(state, x),
        "missing": lambda: None if other else autopar.parallelize(dense_step)(state, x),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ["", ""]
        except autopar.AutoparError as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def main() -> None:
    name, text = sys.argv[1:3]
    o = json.loads(text)
    join(o)
    print("RESULT " + json.dumps(globals()[name](o)), flush=True)


if __name__ == "__main__":
    main()
