"""`annotate`: a StableHLO module of any frontend, planned, with the plan's shardings written into it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from msgspec.structs import replace

from autopar._compat.xla import compile_module
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.frontend import CallSignature, Traced
from autopar.frontend.stablehlo import StablehloModule, read_module, traced_module
from autopar.ir import Graph
from autopar.lower.annotate import annotate as write
from autopar.lower.aot import Verification, compare
from autopar.lower.aot.collectives import GroupNames
from autopar.lower.aot.cpu import CpuTarget
from autopar.lower.aot.messages import CompiledMemory, CompiledSummary
from autopar.lower.aot.spawn import Compilation
from autopar.lower.aot.worker import summarized
from autopar.lower.hlo import collectives, work
from autopar.plan import Plan
from autopar.plan.text import parse_bytes


@dataclass(frozen=True)
class Annotated:
    """An annotated module.

    Args:
        plan: what was planned.
        graph: of the module's function.
        text: the module, in MLIR's text, with ``sdy.mesh``, ``sdy.sharding`` and ``sdy.sharding_constraint``.
    """

    plan: Plan
    graph: Graph
    text: str


class _ModuleFunction(PureFunction):
    """A StableHLO module in the place of a function."""

    def __init__(self, traced: Traced, options: ParallelOptions) -> None:
        super().__init__(traced.signature.arguments, options)
        self._given = traced

    def _trace(self, signature: CallSignature, static_numbers: bool) -> Traced:
        return self._given


def annotate(
    source: str | bytes | Path,
    *,
    cluster: Cluster | str | Path,
    batch: Sequence[int] | None = None,
    search: Any = "alpa",
    memory_limit: int | str | None = None,
    mesh: tuple[int, ...] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Annotated:
    """Plans a StableHLO module and writes the plan into it.

    Args:
        source: path of the module, or what is in it: text, bytecode, or a portable artifact.
        cluster: what to plan for; a name or path of a cluster file too.
        batch: positions of the arguments that are the batch; None finds them by the names that the frontend gave.
        search: strategy, as of `parallelize`.
        memory_limit: bytes a device.
        mesh: sizes of the only logical mesh.
        progress: called with a line when a phase begins.

    Raises:
        TraceError: the module cannot be read, or has an operation that cannot be planned.
        AutoparError: no plan can be made.
    """
    module = read_module(source)
    traced = traced_module(module, batch)
    plan = planned(
        traced,
        ParallelOptions(
            cluster=cluster if isinstance(cluster, Cluster) else Cluster.load(str(cluster)),
            search=search,
            batch_argnums=None if batch is None else tuple(batch),
            num_microbatches=1,
            num_stages=1,
            remat="none",
            memory_limit_bytes=parse_bytes(memory_limit),
            mesh_shape=mesh,
            progress=progress,
        ),
        module,
    )
    return Annotated(plan, traced.graph, write(module, traced, plan))


def planned(traced: Traced, options: ParallelOptions, module: StablehloModule) -> Plan:
    """The plan of a module's function, with what was not kept of the module among its notes."""
    function = _ModuleFunction(traced, options)
    signature = traced.signature
    function._traced[signature] = traced
    plan = function.plan(signature)[1]
    content = plan.content
    return dataclasses.replace(plan, content=replace(content, notes=(*module.notes, *content.notes)))


def compile_annotated(annotated: Annotated) -> Verification:
    """Compiles an annotated module with XLA for the first devices of this process, as many as the plan has, and
    compares its collectives with the plan's.

    Args:
        annotated: from `annotate`.

    Raises:
        ClusterError: there are fewer devices.
    """
    plan = annotated.plan
    count = len(plan.stages[0].devices)
    here = jax.devices()
    if len(here) < count:
        raise ClusterError(
            f"the plan has {count} devices, and this process {len(here)}",
            remedy=f"JAX_NUM_CPU_DEVICES={count} on a CPU, or `--output` alone",
        )
    start = time.perf_counter()
    compiled = compile_module(annotated.text, here[:count])
    done, memory = work(compiled.text), compiled.memory
    program = CompiledSummary(
        compiled.device_kind,
        summarized(collectives(compiled.text), GroupNames(plan.stages[0].mesh_axes)),
        CompiledMemory(
            int(memory.argument_size_in_bytes),
            int(memory.output_size_in_bytes),
            int(memory.temp_size_in_bytes),
            int(memory.alias_size_in_bytes),
        ),
        done.fusions,
        done.cycles,
        time.perf_counter() - start,
    )
    target = CpuTarget(f"{here[0].platform}, by Shardy", count)
    return compare(plan, annotated.graph, target, Compilation(None, {}, program, compiled.text))
