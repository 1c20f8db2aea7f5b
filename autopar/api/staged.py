"""The steps between a function and its compiled program, as `jax.stages` has them: traced, lowered, compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from autopar._compat.dtypes import jax_dtype
from autopar.api.compiled import Compiled
from autopar.api.pure import PureFunction
from autopar.api.user_mesh import outside
from autopar.errors import AutoparError
from autopar.frontend import CallSignature
from autopar.ir import Graph
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.program import lower
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan
from autopar.runtime.local_pipeline import stage_mesh
from autopar.runtime.pipeline import lowered_stage
from autopar.runtime.ray.cluster import RayCluster


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A function traced for one signature; what `ParallelFunction.trace` returns.

    Args:
        pure: plans and compiles.
        signature: of the call.
    """

    pure: PureFunction
    signature: CallSignature

    @property
    def fun_name(self) -> str:
        """Name of the function."""
        return self.graph.name

    @property
    def graph(self) -> Graph:
        """The function's graph."""
        return self.pure.traced(self.signature).graph

    @property
    def out_info(self) -> Any:
        """A pytree like the result, with a `jax.ShapeDtypeStruct` for each array."""
        return _out_info(self)

    def plan(self) -> Plan:
        """The plan. Errors are those of `ParallelFunction.plan`."""
        with outside():
            return self.pure.plan(self.signature)[1]

    def lower(self) -> LoweredCall:
        """Plans the function. Errors are those of `ParallelFunction.plan`."""
        self.plan()
        return LoweredCall(self.pure, self.signature)


@dataclass(frozen=True, eq=False)
class LoweredCall:
    """A planned function whose programs can be read before they are compiled; what `ParallelFunction.lower` returns.

    Args:
        pure: plans and compiles.
        signature: of the call.
    """

    pure: PureFunction
    signature: CallSignature

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self.pure.planned[self.signature][1]

    @property
    def out_info(self) -> Any:
        """A pytree like the result, with a `jax.ShapeDtypeStruct` for each array."""
        return _out_info(self)

    def as_text(self) -> str:
        """StableHLO of the program, or of every stage's programs one behind the other.

        Raises:
            ClusterError: this process has not as many devices as the plan wants.
        """
        with outside():
            return "\n".join(_texts(self.pure, self.signature))

    def compile(self) -> Compiled:
        """Compiles the programs."""
        with outside():
            return self.pure.compile(self.signature)


def _out_info(call: TracedCall | LoweredCall) -> Any:
    traced = call.pure.traced(call.signature)
    return traced.results([jax.ShapeDtypeStruct(o.type.shape, jax_dtype(o.type.dtype)) for o in traced.graph.outputs])


def _texts(pure: PureFunction, signature: CallSignature) -> list[str]:
    traced, plan = pure.planned[signature]
    if isinstance(pure.options.cluster, RayCluster):
        raise AutoparError(
            "the programs of workers on Ray are lowered on the workers",
            remedy="compile(...).as_text(), or lower for Cluster.local()",
        )
    devices = jax.devices()
    if plan.num_stages == 1:
        program = lower(traced, plan, devices)
        return [program.function.lower(*program.shapes(traced)).as_text()]
    lowered = lower_pipeline(
        split_layers(traced, plan.content.stack_groups).step, plan, frozenset(), devices[0].platform
    )
    texts = []
    for stage_program in lowered.programs:
        for worker in lowered.table.workers_of_stage(stage_program.work.stage):
            if stage_program.results:
                lowered_program = lowered_stage(
                    stage_program, stage_mesh(lowered, worker, stage_program.work.stage, devices)
                )
                texts.append(f"// {stage_program.work} on worker {worker}\n{lowered_program.lowered.as_text()}")
    return texts
