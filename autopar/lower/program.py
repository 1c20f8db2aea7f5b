"""One jitted XLA program over all devices, from a traced function and a plan.

The program is one fully manual ``jax.shard_map``: what runs on a device is what the plan says, and
every collective is one that the plan counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar._compat.meshes import device_mesh, partition_spec
from autopar._compat.primitives import typed
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import ClusterError
from autopar.errors.names import counted
from autopar.frontend import Traced
from autopar.ir import Layout
from autopar.ir.analysis import calls_python
from autopar.lower.callbacks import Callbacks
from autopar.lower.hosted import check_host_memory, hosted_of, sharding_of, to_host
from autopar.lower.interpreter import Interpreter, Sharded
from autopar.plan import Plan, PlanContent
from autopar.search.resharding import path_tables
from autopar.sharding.reshard import PathTables
from autopar.sharding.verify_plan import verify_plan


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """A lowered program.

    Args:
        function: takes the graph's inputs as flat global arrays, returns its outputs as a tuple; jitted.
        mesh: the devices, or their numbers alone where the program is compiled for devices that are not here.
        input_shardings: one a graph input.
        output_shardings: one a graph output.
        donated: indices of donated inputs.
        compiler_options: options of XLA by name.
        host_bytes: bytes a device of inputs in host memory, and of outputs there that reuse none of them.
        callbacks: how it calls Python, and what has been raised there.
    """

    function: Any
    mesh: Mesh | AbstractMesh
    input_shardings: tuple[NamedSharding, ...]
    output_shardings: tuple[NamedSharding, ...]
    donated: tuple[int, ...]
    compiler_options: Mapping[str, Any]
    host_bytes: int = 0
    callbacks: Callbacks = field(default_factory=Callbacks)

    def shapes(self, traced: Traced) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each input of ``traced``, for lowering."""
        avals = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=getattr(a, "weak_type", False))
            for a, s in zip(avals, self.input_shardings, strict=True)
        ]


def plan_tables(plan: Plan) -> PathTables:
    """The resharding paths that the plan was made with: those of its cluster and mesh."""
    cluster = Cluster.from_json(plan.content.cluster)
    shape = tuple(n for _, n in plan.stages[0].mesh_axes)
    (mesh,) = cluster.logical_meshes(shape)
    return path_tables(mesh, CostModel(cluster))


def sharded(plan: Plan, platform: str, callbacks: Callbacks) -> Sharded:
    """The plan's records, parsed, for a kind of devices, and how its programs call Python."""
    content = plan.content
    copies: dict[str, dict[str, Layout]] = {}
    for c in content.copies:
        copies.setdefault(c.value, {})[c.phase] = Layout.parse(c.layout)
    return Sharded(
        {r.id: tuple(Layout.parse(t) if t else None for t in r.operands) for r in content.operators},
        {r.id: tuple(map(Layout.parse, r.results)) for r in content.operators},
        copies,
        plan_tables(plan),
        content.memory_bound,
        recomputes=not content.pipeline and content.stages[0].form.remat != "none",
        orders_collectives=platform == "cpu",
        widened=platform == "cpu",
        swaps_products=platform == "cpu",
        hosted=frozenset(r.path for r in content.inputs if r.memory == "host"),
        host_results={r.id: r.host_results for r in content.operators if r.host_results},
        on_host=frozenset(r.id for r in content.operators if r.on_host),
        skips_masked=frozenset(r.id for r in content.operators if r.skips_masked),
        matmuls={r.id: r.collective_matmul for r in content.operators if r.collective_matmul},
        in_steps=platform not in ("cpu", "tpu"),
        callbacks=callbacks,
    )


def stage_devices(plan: Plan, stage: int, devices: Sequence[Any]) -> Mesh:
    """The mesh of one stage over its part of real devices.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
    """
    if plan.num_stages == 1:
        return plan_mesh(plan, devices)
    _check_count(plan, len({d for s in plan.stages for d in s.devices}), devices)
    placed_stage = plan.stages[stage]
    mesh: Mesh = device_mesh(placed_stage.mesh_axes, [devices[i] for i in placed_stage.devices])
    return mesh


def plan_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """The plan's logical mesh over real devices.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
    """
    axes = plan.stages[0].mesh_axes
    _check_count(plan, math.prod(n for _, n in axes), devices)
    mesh: Mesh = device_mesh(axes, devices)
    return mesh


def _check_count(plan: Plan, wanted: int, devices: Sequence[Any]) -> None:
    if wanted != len(devices):
        raise ClusterError(
            f"the plan is for {counted(wanted, 'device')} of {plan.content.cluster_name}; this process has "
            f"{len(devices)}",
            cause="the plan was made for another cluster",
            remedy="plan for Cluster.local(), or run where there are as many devices "
            "(on CPU: XLA_FLAGS=--xla_force_host_platform_device_count=N)",
        )


def lower(traced: Traced, plan: Plan, devices: Sequence[Any]) -> LoweredProgram:
    """The program that runs ``plan`` on ``devices``.

    Args:
        traced: the function that the plan was made for.
        plan: a plan with one stage.
        devices: jax devices, in the order of the cluster.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
        PlanMismatchError: the plan keeps something in host memory that the devices have no access to.
    """
    check_host_memory(plan.content, devices)
    return lower_on(traced, plan, plan_mesh(plan, devices), devices[0].platform)


def lower_on(traced: Traced, plan: Plan, mesh: Mesh | AbstractMesh, platform: str) -> LoweredProgram:
    """The program that runs ``plan`` on ``mesh``.

    Args:
        traced: the function that the plan was made for.
        plan: a plan with one stage.
        mesh: its logical mesh, from `plan_mesh`, or without devices.
        platform: jax's name of the kind of devices: "cpu", "tpu", "cuda".
    """
    callbacks = Callbacks(by_buffers=platform == "cpu", guards=calls_python(traced.graph))
    decisions, hosted = sharded(plan, platform, callbacks), hosted_of(plan.content)
    graph = traced.graph
    if plan.unproven:
        verify_plan(graph, plan.content, decisions.tables)
    inputs = [Layout.parse(r.layout) for r in plan.content.inputs]
    outputs = [Layout.parse(r.layout) for r in plan.content.outputs]

    def on_device(*arrays: Any) -> tuple[Any, ...]:
        results = Interpreter(decisions).run(traced.program, arrays, inputs, outputs)
        plain_results = [jax.numpy.asarray(r) if isinstance(r, np.ndarray | np.generic) else r for r in results]
        return tuple(to_host(r) if n in hosted.outputs else r for n, r in enumerate(plain_results))

    in_specs = tuple(partition_spec(k.dims) for k in inputs)
    out_specs = tuple(partition_spec(k.dims) for k in outputs)
    body = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def whole(*arrays: Any) -> tuple[Any, ...]:
        results = body(*arrays)
        return tuple(typed(r, weak) for r, weak in zip(results, traced.weak, strict=True))

    on_device.__name__ = whole.__name__ = graph.name
    in_shardings = tuple(sharding_of(r, mesh, host=n in hosted.inputs) for n, r in enumerate(plan.content.inputs))
    out_shardings = tuple(sharding_of(r, mesh, host=n in hosted.outputs) for n, r in enumerate(plan.content.outputs))
    wanted = set(plan.content.donated)
    donated = tuple(i for i, r in enumerate(plan.content.inputs) if r.path in wanted)
    function = jax.jit(whole, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donated)
    options = dict(_joining(plan, platform))
    options.update(where_memory_is_short(plan.content, platform))
    sizes = plan.stages[0].mesh_shape
    host_bytes = sum(
        inputs[n].local_bytes(graph.inputs[n].type, sizes) * (1 if n in donated else 2) for n in sorted(hosted.inputs)
    )
    return LoweredProgram(function, mesh, in_shardings, out_shardings, donated, options, host_bytes, callbacks)


def where_memory_is_short(content: PlanContent, platform: str) -> dict[str, str]:
    """Options of XLA's compiler for CPU where memory is short: else it schedules for concurrency, breadth first.

    Args:
        content: a plan of one stage, or of a stage.
        platform: jax's name of the kind of devices.
    """
    form = content.stages[0].form
    if platform != "cpu" or not (content.memory_bound or form.recomputes or form.block_scores > 0):
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def _joining(plan: Plan, platform: str) -> dict[str, str]:
    """Options of XLA's compiler for GPUs: the bytes up to which collectives are sent as one."""
    (stage,) = plan.stages
    if platform not in ("cuda", "gpu"):
        return {}
    joined = stage.thresholds
    if joined is None:
        return {}
    of_kind = {"all_reduce": joined.sums, "reduce_scatter": joined.sums, "all_gather": joined.gathers}
    return {f"xla_gpu_{kind}_combine_threshold_bytes": str(n) for kind, n in of_kind.items()}
