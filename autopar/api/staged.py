"""The steps between a function and its compiled program, as `jax.stages` has them: traced, lowered, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from autopar.api.compiled import CallInfo, Compiled
from autopar.api.pure import PureFunction
from autopar.api.user_mesh import as_traced
from autopar.errors import AutoparError, ClusterError, TraceError
from autopar.frontend import CallSignature, Traced
from autopar.ir import Graph
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.program import lower, lower_on, plan_mesh
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.stage_programs import lowered_stage, stage_mesh


@dataclass(frozen=True, eq=False)
class TracedCall(CallInfo):
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
    def jaxpr(self) -> ClosedJaxpr:
        """The function's jaxpr as it is written, before it is planned; its inputs are the arrays of the arguments."""
        return self.pure.traced(self.signature).written

    @property
    def out_avals(self) -> Any:
        """A pytree like the result, with the abstract value of each array."""
        traced = self.pure.traced(self.signature)
        return traced.results(traced.written.out_avals)

    def _call(self) -> tuple[Traced, tuple[int, ...]]:
        traced = self.pure.traced(self.signature)
        return traced, self.pure.donated(traced)

    def plan(self) -> Plan:
        """The plan. Errors are those of `ParallelFunction.plan`."""
        with as_traced(self.signature):
            return self.pure.plan(self.signature)[1]

    def lower(self, *, lowering_platforms: Sequence[str] | None = None, **of_jax: Any) -> LoweredCall:
        """Plans the function. Errors are those of `ParallelFunction.plan`.

        Args:
            lowering_platforms: jax's names of the platforms that programs are lowered for, as "tpu"; None for that of
                the devices. Programs for other platforms can be read here, not run.
            of_jax: options that `jax.export` gives to functions of `jax.jit`.

        Raises:
            TraceError: the call has options of `jax.export`.
        """
        if of_jax:
            raise TraceError(
                f"{self.fun_name} runs by a plan, which jax.export does not write",
                cause="jax.export.export of a decorated function",
                remedy="export the function without a plan: jax.export.export(jax.jit(step))",
            )
        self.plan()
        platforms = None if lowering_platforms is None else tuple(lowering_platforms)
        return LoweredCall(self.pure, self.signature, platforms)


@dataclass(frozen=True, eq=False)
class LoweredCall(CallInfo):
    """A planned function whose programs can be read before they are compiled; what `ParallelFunction.lower` returns.

    Args:
        pure: plans and compiles.
        signature: of the call.
        platforms: that programs are lowered for; None for that of the devices.
    """

    pure: PureFunction
    signature: CallSignature
    platforms: tuple[str, ...] | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the programs are lowered from."""
        return self.pure.planned[self.signature][1]

    def _call(self) -> tuple[Traced, tuple[int, ...]]:
        traced = self.pure.planned[self.signature][0]
        return traced, self.pure.donated(traced)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text, or those of every stage one after the other.

        Args:
            dialect: "stablehlo" (None too) or "hlo".
            debug_info: whether lines of the source are in it.

        Raises:
            ClusterError: this process has not as many devices as the plan wants.
        """
        with as_traced(self.signature):
            programs = self._lowered()
            texts = {title: program.as_text(dialect, debug_info=debug_info) for title, program in programs.items()}
        return "\n".join(f"// {title}\n{text}" if title else text for title, text in texts.items())

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program as an object of jax's compiler; of several stages a dict by program. Errors as `as_text`'s.

        Args:
            dialect: "stablehlo" (None too) or "hlo".
        """
        with as_traced(self.signature):
            programs = {t: program.compiler_ir(dialect) for t, program in self._lowered().items()}
        return programs.get("", programs)

    def cost_analysis(self) -> Any:
        """jax's cost statistics before compiling; of several stages a dict by program. Errors as `as_text`'s."""
        with as_traced(self.signature):
            costs = {title: program.cost_analysis() for title, program in self._lowered().items()}
        return costs.get("", costs)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles the programs.

        Args:
            compiler_options: of XLA, as `jax.stages.Lowered.compile` takes them, besides those of the plan.

        Raises:
            AutoparError: options for several programs, or for those of other processes.
            ClusterError: the programs were lowered for another platform than that of the devices.
        """
        here = jax.devices()[0].platform
        if self.platforms is not None and here not in self.platforms:
            raise ClusterError(
                f"a program that was lowered for {' and '.join(self.platforms)} cannot run on {here}",
                cause="lowering_platforms named other platforms than that of this process's devices",
                remedy="autopar.verify(..., target=) compiles for other hardware",
            )
        with as_traced(self.signature):
            if compiler_options:
                return self.pure.compile_with(self.signature, compiler_options)
            return self.pure.compile(self.signature)

    def _lowered(self) -> dict[str, Any]:
        return _lowered(self.pure, self.signature, self.platforms)


def _lowered(pure: PureFunction, signature: CallSignature, platforms: tuple[str, ...] | None) -> dict[str, Any]:
    """jax's lowered programs by title, which is "" where there is only one."""
    traced, plan = pure.planned[signature]
    if isinstance(pure.options.cluster, RayCluster):
        raise AutoparError(
            "the programs of workers on Ray are lowered on the workers",
            remedy="compile(...).as_text(), or lower for Cluster.local()",
        )
    devices = jax.devices()
    if plan.num_stages == 1:
        if platforms is None:
            program = lower(traced, plan, devices)
            return {"": program.function.lower(*program.shapes(traced))}
        program = lower_on(traced, plan, plan_mesh(plan, devices), platforms[0])
        return {"": program.function.trace(*program.shapes(traced)).lower(lowering_platforms=platforms)}
    if platforms is not None:
        raise AutoparError(
            "programs of several stages are lowered for the devices that run them",
            remedy="lower(...) without lowering_platforms, or num_stages=1",
        )
    lowered = lower_pipeline(
        split_layers(traced, plan.content.stack_groups).step, plan, frozenset(), devices[0].platform
    )
    return {
        f"{program.work} on worker {worker}": lowered_stage(
            program, stage_mesh(lowered, worker, program.work.stage, devices)
        ).lowered
        for program in lowered.programs
        for worker in lowered.table.workers_of_stage(program.work.stage)
        if program.results
    }
