"""`PureFunction`: plans and compiles a function for each signature, and runs it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import msgspec

from autopar._compat.devices import world_devices
from autopar._compat.world import World
from autopar.api.attempts import Attempts
from autopar.api.compiled import Compiled
from autopar.api.constraints import MOST_PRICED, constraints_of, merged, price_note
from autopar.api.devices import check_devices
from autopar.api.effects import check_effects
from autopar.api.fitting import Planned, build_within
from autopar.api.for_workers import check_for_workers, kept_on_devices
from autopar.api.input_tree import input_tree
from autopar.api.last_batch import LastBatch
from autopar.api.lying import Lying, lying_arrays, lying_of
from autopar.api.many_hosts import agree, check_stages, many, same_arguments, share
from autopar.api.one_stage import one_stage
from autopar.api.options import ParallelOptions
from autopar.api.restacked import restacked
from autopar.api.user_mesh import outside
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError, TraceError
from autopar.frontend import CallSignature, SignatureOptions, Traced, flatten_call, trace
from autopar.frontend.signature import NUMBERS, context_mesh, positional_names, resolve, x64_enabled
from autopar.frontend.trace import needs_values
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.ir.verify import verify
from autopar.lower.microbatch import microbatched
from autopar.lower.pipeline.build import LoweredPipeline, lower_pipeline
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.program import lower
from autopar.lower.recompute import recomputed_step
from autopar.lower.unstack import Unstacked, group_count, layer_count, unstack
from autopar.microbatch import batch_size
from autopar.plan import Plan
from autopar.recompute import Level
from autopar.runtime import load_local, load_pipeline
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.program import load_remote
from autopar.search import Options, Problem, Strategy, cuts_stages, strategy_named
from autopar.search.bound import bounded
from autopar.search.cache import PlanCache, cached, cached_with_stages, plan_cache
from autopar.search.clock import Clock
from autopar.search.compare import Budgeted
from autopar.search.garbage import rare_collections
from autopar.search.inter.counts import MOST_GROUPS, MOST_STAGES, TINY, is_large


class PureFunction:
    """A function of pytrees with its plans and programs by signature.

    Args:
        fn: the function; it changes none of its arguments.
        options: what `parallelize` was told.
    """

    def __init__(self, fn: Callable[..., Any], options: ParallelOptions) -> None:
        self.fn = fn
        self.options = options
        self.names = positional_names(fn)
        self.signature_options = SignatureOptions(options.static_argnums, options.static_argnames, names=self.names)
        self.planned: dict[CallSignature, tuple[Traced, Plan]] = {}
        self.compiled: dict[CallSignature, Compiled] = {}
        self._traced: dict[CallSignature, Traced] = {}
        self._numbers_static: set[CallSignature] = set()
        self._last_batch = LastBatch()
        self._lying: dict[CallSignature, Lying] = {}
        self._recent: Compiled | None = None

    def again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Runs a step if it is the same kind of call as the last one, for which nothing has to be hashed.

        Returns whether it is, and the result.
        """
        recent = self._recent
        if recent is None or recent.traced.signature.static_args:
            return False, None
        leaves, treedef = jax.tree.flatten((args, kwargs))
        signature = recent.traced.signature
        if treedef != signature.treedef or signature.x64 != x64_enabled() or signature.mesh != context_mesh():
            return False, None
        traced = recent.repeated(leaves)
        placed = None if traced is None else recent.local.match(traced)
        return (False, None) if placed is None else (True, recent.run_placed(placed, traced or []))

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self.fn(*args, **kwargs)  # inside another transformation the plain function is what runs
        signature, leaves = self.resolve(args, kwargs)
        with outside():
            first = signature not in self.compiled
            compiled = self.compile(signature)
        processes = many(self.options) if first else None
        if processes is not None:
            same_arguments(processes, compiled.traced.graph.name, leaves, [p for p, _, _ in compiled.traced.arguments])
        self._recent = compiled
        return compiled.run(leaves)

    def resolve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallSignature, list[Any]]:
        """The signature of a call and its traced leaves; the function is traced for it if it was not yet.

        Python numbers are traced, as in `jax.jit`. Where that fails and the numbers' values make it work, they
        are values of the program from then on.
        """
        signature, leaves = flatten_call(self.fn, args, kwargs, self.signature_options)
        if signature in self._traced:
            return signature, leaves
        static_options = replace(self.signature_options, static_numbers=True)
        if signature not in self._numbers_static:
            try:
                self._traced[signature] = traced = self._trace(signature, False)
                self._lying[signature] = lying_arrays(traced, leaves, world_devices)
                return signature, leaves
            except TraceError as error:
                if not needs_values(error.__cause__) or not any(isinstance(leaf, NUMBERS) for leaf in leaves):
                    raise
                other, other_leaves = flatten_call(self.fn, args, kwargs, static_options)
                try:
                    self._traced[other] = self._trace(other, True)
                except Exception:
                    other_leaves = []
                    other = signature
                if other == signature:
                    raise
                self._numbers_static.add(signature)
                return other, other_leaves
        signature, leaves = flatten_call(self.fn, args, kwargs, static_options)
        if signature not in self._traced:
            self._traced[signature] = self._trace(signature, True)
        return signature, leaves

    def _trace(self, signature: CallSignature, static_numbers: bool) -> Traced:
        self._say("tracing")
        clock = Clock()
        with clock.phase("trace"):
            traced = trace(self.fn, signature, batch_argnums=self.options.batch_argnums, static_numbers=static_numbers)
        return replace(traced, phases=clock.phases())

    def traced(self, signature: CallSignature) -> Traced:
        """The traced function for a signature of `resolve`."""
        return self._traced[signature]

    def plan(self, signature: CallSignature) -> tuple[Traced, Plan]:
        """The traced function and its plan. ``signature`` comes from `resolve`."""
        found = self.planned.get(signature)
        if found is not None:
            return found
        clock = Clock()
        with clock.phase("graph"):
            verify(self._traced[signature].graph)
        plan = self.options.plan
        if plan is not None:
            traced = self._in_form_of(signature, plan)
        else:
            with rare_collections():
                traced, plan = self._planned(signature, self.options.memory_limit_bytes)
                plan = self._with_prices(signature, plan)
        plan = Plan(plan.content, (*traced.phases, *clock.phases(), *plan.phases), input_tree(traced))
        self.planned[signature] = traced, plan
        return traced, plan

    def _in_form_of(self, signature: CallSignature, plan: Plan) -> Traced:
        """The function in the form that ``plan`` was made for. PlanMismatchError where it is another's."""
        traced = self._traced[signature]
        if plan.num_stages == 1:
            own = plan.stages[0]
            traced = self._microbatched(signature, plan.num_microbatches, own.remat, own.layer_ends)[0]
        names = [*(i.name for i in traced.graph.inputs), *(op.id for op in traced.graph.operators)]
        plan.check_program(fingerprint(traced.graph), traced.graph.name, names)
        return traced

    def _plan_together(self, signature: CallSignature, processes: World) -> tuple[Traced, Plan]:
        """`plan` of process 0 on all processes, which were found to compile the same function."""
        traced = self._traced[signature]
        agree(processes, traced, self.options, self.donated(traced))
        form = partial(self._in_form_of, signature)
        check_stages(self.options, processes)
        planned = share(processes, traced.graph.name, lambda: Planned(*self.plan(signature)), form)
        plan = Plan(planned.plan.content, planned.plan.phases or traced.phases, input_tree(planned.traced))
        self.planned[signature] = planned.traced, plan
        return planned.traced, plan

    def _with_prices(self, signature: CallSignature, plan: Plan) -> Plan:
        """``plan`` with a note for each constraint: what it costs against leaving it free."""
        pins, limit = self.options.constraints, self.options.memory_limit_bytes
        groups = [(pin,) for pin in pins] if len(pins) <= MOST_PRICED else [pins]
        notes = []
        for group in groups if pins else []:
            rest = tuple(p for p in pins if p not in group)
            free = PureFunction(self.fn, replace(self.options, constraints=rest))
            free._traced[signature] = self._traced[signature]
            notes.append(price_note(group, plan.step_time, free._planned(signature, limit)[1].step_time))
        content = msgspec.structs.replace(plan.content, notes=(*notes, *plan.content.notes))
        return Plan(content, plan.phases) if notes else plan

    def _microbatched(
        self, signature: CallSignature, count: int, level: Level, ends: Sequence[str] | None = None
    ) -> tuple[Traced, tuple[str, ...]]:
        """The function in ``count`` microbatches, with what ``level`` does not hold computed anew.

        Args:
            signature: of the call.
            count: number of microbatches.
            level: what is held of the forward pass.
            ends: of its layers, as a plan records them; None finds them.

        Returns it, and the ends of its layers.

        Raises:
            MicrobatchError: there cannot be as many microbatches.
        """
        again, found = recomputed_step(self._traced[signature], level, ends)
        made = microbatched(again, count)
        if count > 1 or level != "none":
            verify(made.graph)
        return made, found

    def _planned(self, signature: CallSignature, limit_bytes: int | None) -> tuple[Traced, Plan]:
        """The function in the number of microbatches that was chosen, and its plan within ``limit_bytes`` a device.

        Where the number of stages is free and the cluster has several nodes, several stages are tried first, and one in
        ways that may be faster; the plan that is predicted faster is taken. On one node several are tried where one
        does not fit.
        """
        asked = self.options.num_stages
        if isinstance(self.options.cluster, RayCluster):
            return self._traced[signature], self._pipeline(signature, limit_bytes)
        if isinstance(asked, int) and asked > 1:
            return self._traced[signature], self._pipeline(signature, limit_bytes)
        devices = (self.options.cluster or Cluster.local()).num_devices
        if asked == "auto" and many(self.options) is not None:  # stages are carried out in one process
            return self._one_stage(signature, limit_bytes, math.inf)
        if asked == "auto" and devices > 1 and cuts_stages(self._strategy()):
            return self._traced[signature], self._pipeline(signature, limit_bytes)
        several = asked == "auto" and isinstance(self.options.search, str | Budgeted)
        schedule, nodes = self.options.schedule, (self.options.cluster or Cluster.local()).num_nodes
        other: Plan | None = None
        tried = several and schedule != "none" and (nodes > 1 or schedule != "auto")
        if tried:
            with contextlib.suppress(InfeasiblePlanError, MicrobatchError):
                other = self._pipeline(signature, limit_bytes)
        try:
            traced, plan = self._one_stage(signature, limit_bytes, math.inf if other is None else other.step_time)
            if asked == "auto" or self.options.num_microbatches == "auto" or self.options.remat == "auto":
                cluster = self.options.cluster or Cluster.local()
                plan = bounded(plan, self._traced[signature].graph, cluster)
        except InfeasiblePlanError as error:
            if several and not tried:
                with contextlib.suppress(InfeasiblePlanError, MicrobatchError):
                    other = self._pipeline(signature, limit_bytes)
            if other is None:  # less memory would do for a stage of several, but not for all of them
                raise error from None
            return self._traced[signature], other
        if other is not None and other.step_time < plan.step_time:
            return self._traced[signature], other
        return traced, plan

    def _searched(self, signature: CallSignature, limit_bytes: int) -> Planned:
        return Planned(*self._planned(signature, limit_bytes))

    def _one_stage(self, signature: CallSignature, limit_bytes: int | None, enough_s: float) -> tuple[Traced, Plan]:
        """The plan of one stage, in the numbers of microbatches that may be taken; see `one_stage`."""
        graph = self._traced[signature].graph
        asked = self._counts(graph)
        size = batch_size(graph) or 1
        return one_stage(
            Attempts(partial(self._one_way, signature, limit_bytes)),
            [2**k for k in range(size.bit_length())] if asked is None else asked,
            self.options.remat or "none",
            offload=self.options.offload != "none",
            tiny=len(graph.operators) <= TINY,
            enough_s=enough_s,
        )

    def _one_way(
        self,
        signature: CallSignature,
        limit_bytes: int | None,
        count: int,
        level: Level,
        enough_s: float,
        explain: bool,
    ) -> tuple[Traced, Plan]:
        """The plan of one stage in ``count`` microbatches that computes anew what ``level`` does not hold.

        See `Options` for ``enough_s`` and ``explain``.
        """
        traced, ends = self._microbatched(signature, count, level)
        problem = self.problem(traced, limit_bytes, count)
        plan = self._search(replace(problem, options=replace(problem.options, enough_s=enough_s, explain=explain)))
        return traced, Plan(plan.content.recomputing(level, ends), plan.phases)

    def _counts(self, graph: Graph) -> list[int] | None:
        """Numbers of microbatches that may be taken, the first is wanted; None where all may."""
        asked = self.options.num_microbatches
        return None if asked == "auto" else self._last_batch.counts(graph, int(asked), first=not self.planned)

    def _pipeline(self, signature: CallSignature, limit_bytes: int | None) -> Plan:
        """The best plan with several stages."""
        traced = self._traced[signature]
        o = self.options
        asked = self._counts(traced.graph)
        count = None if asked is None else asked[0]
        cluster = o.cluster or Cluster.local()
        unstacked = unstack(traced, self._stack_groups(traced))
        return self._pipelined(traced, unstacked, cluster, self._num_stages(), count, o.schedule, limit_bytes)

    def _pipelined(
        self,
        traced: Traced,
        unstacked: Unstacked,
        cluster: Cluster,
        stages: int | None,
        microbatches: int | None,
        schedule: Any,
        limit_bytes: int | None,
    ) -> Plan:
        """The best plan with several stages on a cluster; what is None is free."""
        options = replace(
            self.problem(traced, limit_bytes).options,
            donated=frozenset(n for i in self.donated(traced) for n in unstacked.names(i)),
            constraints=constraints_of(self.options.constraints, traced.graph, cluster.num_devices, unstacked.names),
            num_microbatches=microbatches,
            num_stages=stages,
            equal=isinstance(cluster, RayCluster) and self.options.num_stages == "auto",
            schedule=schedule,
            remat="none" if self.options.remat is False else self.options.remat,
            offload="none" if (kept := kept_on_devices(self.options, unstacked)) else self.options.offload,
        )
        source = TracedStages(unstacked.step)
        problem = Problem(unstacked.step.graph, cluster, CostModel(cluster), options, source)
        self._say(f"slicing {len(traced.graph.operators)} operators into stages for {cluster}")
        plan = cached_with_stages(self._strategy(), self._cache)(problem)
        if kept:
            plan = Plan(msgspec.structs.replace(plan.content, notes=(*plan.content.notes, kept)), plan.phases)
        return restacked(plan, traced.graph, unstacked)

    def _num_stages(self) -> int | None:
        """Number of stages that is asked for: on Ray that of the cluster unless said otherwise."""
        asked, cluster = self.options.num_stages, self.options.cluster
        if asked == "auto":
            return cluster.num_stages if isinstance(cluster, RayCluster) else None
        return int(asked)

    def _stack_groups(self, traced: Traced) -> int:
        """Groups of layers into which stacks are taken apart; the strategy may say for how many stages."""
        stages = self._num_stages() or getattr(self._strategy(), "num_stages", None)
        large = is_large(self.options.cluster or Cluster.local())
        return group_count(layer_count(traced.graph), stages, 2 * MOST_STAGES if large else MOST_GROUPS)

    def _strategy(self) -> Strategy:
        search = self.options.search
        return strategy_named(search) if isinstance(search, str) else search

    @cached_property
    def _cache(self) -> PlanCache | None:
        """Plans on disk, as the environment says when the first plan is made."""
        return plan_cache(os.environ)

    def _search(self, problem: Problem) -> Plan:
        self._say(f"planning {len(problem.graph.operators)} operators for {problem.cluster}")
        return cached(self._strategy(), self._cache)(problem)

    def problem(self, traced: Traced, memory_limit_bytes: int | None, microbatches: int = 1) -> Problem:
        """What the search is given."""
        o = self.options
        cluster = o.cluster or Cluster.local()
        donated = frozenset(traced.arguments[i][0] for i in self.donated(traced))
        lying = lying_of(traced, o, self._lying.get(traced.signature))
        return Problem(
            traced.graph,
            cluster,
            CostModel(cluster),
            Options(
                mesh_shape=o.mesh_shape or lying.mesh_shape,
                memory_limit_bytes=memory_limit_bytes,
                donated=donated,
                num_microbatches=microbatches,
                offload=o.offload,
                say=o.progress,
                constraints=merged(lying.constraints, constraints_of(o.constraints, traced.graph, cluster.num_devices)),
            ),
        )

    def donated(self, traced: Traced) -> tuple[int, ...]:
        """Indices of the traced leaves whose buffers the step may reuse."""
        positions, names = resolve(self.options.donate_argnums, self.options.donate_argnames, self.names)
        return tuple(
            i for i, (_, argument, _) in enumerate(traced.arguments) if argument in positions or argument in names
        )

    def compile(self, signature: CallSignature) -> Compiled:
        """The program for a signature of `resolve`."""
        found = self.compiled.get(signature)
        if found is not None:
            return found
        cluster = self.options.cluster
        if not isinstance(cluster, RayCluster):
            check_devices(self.options.plan, cluster, len(world_devices()))
        processes = many(self.options)
        traced, plan = self.plan(signature) if processes is None else self._plan_together(signature, processes)
        if isinstance(cluster, RayCluster):
            return self._compile_remote(signature, traced, plan, cluster)
        devices = world_devices()
        check_effects(traced.graph)
        clock = Clock()

        def build(planned: Planned) -> LoadedProgram:
            if planned.plan.num_stages > 1:
                return self._build_stages(planned, clock)
            with clock.phase("lower"):
                program = lower(planned.traced, planned.plan, devices)
            self._say("compiling")
            with clock.phase("compile"):
                return load_local(planned.traced, program, self.donated(planned.traced))

        def search(memory_limit_bytes: int) -> Planned:
            make, form = partial(self._searched, signature, memory_limit_bytes), partial(self._in_form_of, signature)
            with clock.phase("plan again"):
                return make() if processes is None else share(processes, traced.graph.name, make, form)

        limit = None if self.options.plan is not None else self.options.memory_limit_bytes
        final, local = build_within(Planned(traced, plan), limit, build, search)
        kept = Plan(final.plan.content, plan.phases, plan.input_tree)
        return self._keep(signature, final.traced, kept, clock, local)

    def _build_stages(self, planned: Planned, clock: Clock) -> LoadedProgram:
        """The program of a plan with several stages, in this process."""
        traced, plan = planned.traced, planned.plan
        with clock.phase("lower"):
            unstacked = unstack(traced, plan.content.stack_groups)
            pieces = {n for i in self.donated(traced) for n in unstacked.names(i)}
            lowered = lower_pipeline(unstacked.step, plan, pieces, jax.devices()[0].platform)
        self._say("compiling")
        with clock.phase("compile"):
            return load_pipeline(traced, unstacked, lowered, jax.devices(), self.donated(traced))

    def _compile_remote(self, signature: CallSignature, traced: Traced, plan: Plan, cluster: RayCluster) -> Compiled:
        """The program for a signature on workers in other processes."""
        check_for_workers(plan, cluster)
        check_effects(traced.graph)
        clock = Clock()
        with clock.phase("lower"):
            unstacked = unstack(traced, plan.content.stack_groups)
            lowered = lower_pipeline(unstacked.step, plan, platform=cluster.run.platform)

        def again(smaller: RayCluster) -> LoweredPipeline:
            other = self._pipeline_on(smaller, traced, unstacked, plan)
            return lower_pipeline(unstacked.step, other, platform=cluster.run.platform)

        with clock.phase("compile"):
            remote = load_remote(
                traced, unstacked, lowered, cluster, self.donated(traced), self.options.progress, again
            )
        return self._keep(signature, traced, plan, clock, remote)

    def _pipeline_on(self, cluster: RayCluster, traced: Traced, unstacked: Unstacked, before: Plan) -> Plan:
        """The best pipeline for fewer workers than ``before`` was made for; what was asked for holds where it can."""
        o = self.options
        stages = cluster.num_stages if isinstance(o.num_stages, str) else min(int(o.num_stages), len(cluster.slots))
        limit = o.memory_limit_bytes
        try:
            return self._pipelined(traced, unstacked, cluster, stages, before.num_microbatches, o.schedule, limit)
        except (InfeasiblePlanError, MicrobatchError, ScheduleError):
            return self._pipelined(traced, unstacked, cluster, None, None, "auto", limit)

    def _keep(
        self,
        signature: CallSignature,
        traced: Traced,
        plan: Plan,
        clock: Clock,
        local: LoadedProgram,
    ) -> Compiled:
        """Remembers a compiled signature."""
        plan = Plan(plan.content, (*plan.phases, *clock.phases()), plan.input_tree)
        self.planned[signature] = traced, plan
        compiled = Compiled(plan, traced, local, self.fn, self.signature_options, self.resolve)
        self.compiled[signature] = compiled
        return compiled

    def _say(self, text: str) -> None:
        if self.options.progress is not None:
            self.options.progress(text)
