"""`PureFunction`: plans and compiles a function for each signature, and runs it.

`resolve` finds the signature of a call, `plan` and `compile` answer for it. `with_operators` adds the source line and
the einsum-like form of each operator to a plan.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax

from autopar._compat.context import context_text, trace_context
from autopar._compat.devices import world_devices
from autopar._compat.world import World
from autopar.api.batches import LastBatch
from autopar.api.compiled import Compiled
from autopar.api.constraints import Pin, constraints_of, merged
from autopar.api.many_hosts import agree, many, same_arguments, share, takes_one_program, takes_one_stage
from autopar.api.options import ParallelOptions
from autopar.api.placement import CurrentPlacement, array_placement, planned_by_types, requested_placement
from autopar.api.programs import (
    build_stages,
    build_without_flush_on_workers,
    carried_out,
    check_callbacks,
    check_devices,
    check_effects,
    check_for_workers,
    verify_unproven,
    warn_of_unused,
)
from autopar.api.progress import shown
from autopar.api.replanned import verified_plan, with_prices
from autopar.api.shared_state import SharedState
from autopar.api.steps import TracedStep, about, as_planned, form_of, rewritten
from autopar.api.user_mesh import outside
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import (
    AutoparError,
    InfeasiblePlanError,
    MicrobatchError,
    ScheduleError,
    TraceError,
)
from autopar.frontend import CallSignature, SignatureOptions, Traced, flatten_call, trace
from autopar.frontend.signature import NUMBERS, positional_names, resolve
from autopar.frontend.trace import PLAIN_ERRORS, needs_values
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.ir.verify import verify
from autopar.lower.branches import with_own_buffers
from autopar.lower.packed_tables import packed_tables
from autopar.lower.pipeline.build import LoweredPipeline, lower_pipeline
from autopar.lower.pipeline.grid import OneProgramError
from autopar.lower.program import lower
from autopar.lower.split_layers import SplitStep, split_layers
from autopar.plan import Plan
from autopar.runtime import load_local
from autopar.runtime.loaded import LoadedProgram
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.program import load_remote
from autopar.schedule.without_flush.schedules import check_flush, flushes, updates_stagewise
from autopar.search import Job, Problem, Reporting, Strategy, Subproblem, cuts_stages, strategy_named
from autopar.search.cache import PlanCache, plan_cache
from autopar.search.clock import Clock
from autopar.search.compare import Budgeted
from autopar.search.compiled_plans import Planned, build_within
from autopar.search.counterfactuals import SearchedCounterfactuals
from autopar.search.decision import Decision, asks_for_branches
from autopar.search.garbage import rare_collections
from autopar.search.operator_details import with_operators
from autopar.search.planner import fastest, plan_on_workers, plan_step
from autopar.solver.meter import Work


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
        self._placements: dict[CallSignature, CurrentPlacement] = defaultdict(CurrentPlacement)
        self._recent: Compiled | None = None

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Runs a step if it is the same kind of call as the last one, for which nothing has to be hashed.

        Returns whether it is, and the result.
        """
        recent = self._recent
        if recent is None or recent.traced.signature.static_args:
            return False, None
        leaves, treedef = jax.tree.flatten((args, kwargs))
        signature = recent.traced.signature
        if treedef != signature.treedef or signature.context != trace_context():
            return False, None
        traced = recent.repeated(leaves)
        placed = None if traced is None else recent.local.match(traced)
        return (False, None) if placed is None else (True, recent.run_placed(placed, traced or []))

    @shown
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

    @shown
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
                self._placements[signature] = array_placement(traced, leaves, world_devices, self.options)
                return signature, leaves
            except (TraceError, *PLAIN_ERRORS) as error:
                cause = error.__cause__ if isinstance(error, TraceError) else error
                if not needs_values(cause) or not any(isinstance(leaf, NUMBERS) for leaf in leaves):
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
            traced = trace(self.fn, signature, static_numbers=static_numbers, **self.options.tracing)
            traced = rewritten(with_own_buffers(traced), self.options)
        return replace(traced, phases=clock.phases())

    def traced(self, signature: CallSignature) -> Traced:
        """The traced function for a signature of `resolve`."""
        return self._traced[signature]

    @shown
    def plan(self, signature: CallSignature) -> tuple[Traced, Plan]:
        """The traced function and its plan. ``signature`` comes from `resolve`."""
        planned = self.planned.get(signature)
        if planned is not None:
            return planned
        clock = Clock()
        with clock.phase("graph"):
            verify(self._traced[signature].graph)
            check_callbacks(self._traced[signature].graph, self.options.cluster)
        plan = self.options.plan
        if plan is not None:
            with carried_out(plan):
                traced = self._in_form_of(signature, plan)
                verify_unproven(plan, traced, self.donated(traced))
        else:
            search = self._planned if self.options.verify is None else partial(verified_plan, self.options, self._like)
            with rare_collections():
                traced, plan = search(signature, self.options.memory_limit_bytes)
                plan = with_prices(self.options, self._like, signature, plan)
        # Of an object without plans: a cycle would keep what the function closes over until the collector runs.
        planless = PureFunction(self.fn, self.options)
        planless._placements = self._placements
        searched = partial(planless.searched, self._traced[signature], self.options.memory_limit_bytes)
        again = (
            None if self.options.plan is not None else SearchedCounterfactuals(searched, plan.content, packed_tables)
        )
        details = plan.details if plan.num_stages > 1 else with_operators(plan.details, traced.graph)
        plan = replace(plan, input_tree=input_tree(traced), details=details, again=again)
        plan = plan.after((*traced.phases, *clock.phases()))
        self.planned[signature] = traced, plan
        return traced, plan

    def _in_form_of(self, signature: CallSignature, plan: Plan) -> Traced:
        """The function in the form that ``plan`` was made for. PlanMismatchError where it is another's."""
        traced = form_of(self._traced[signature], plan)
        if plan.num_stages == 1:
            traced = as_planned(traced, plan)
        names = [*(i.name for i in traced.graph.inputs), *(op.id for op in traced.graph.operators)]
        plan.check_program(fingerprint(traced.graph), traced.graph.name, names)
        return traced

    def _plan_together(self, signature: CallSignature, processes: World) -> tuple[Traced, Plan]:
        """`plan` of process 0 on all processes, which were found to compile the same function."""
        traced = self._traced[signature]
        clock = agree(processes, traced, self.options, self.donated(traced))
        form = partial(self._in_form_of, signature)
        planned = share(processes, traced.graph.name, lambda: Planned(*self.plan(signature)), form, clock)
        plan = replace(planned.plan, phases=planned.plan.phases or traced.phases, input_tree=input_tree(planned.traced))
        self.planned[signature] = planned.traced, plan
        return planned.traced, plan

    def _like(self, signature: CallSignature, options: ParallelOptions) -> Callable[[int | None], Planned[Traced]]:
        """Plans the function with other options, for bytes a device."""
        other = PureFunction(self.fn, options)
        other._traced[signature] = self._traced[signature]
        other._placements.update(self._placements)
        return lambda limit_bytes: Planned(*other._planned(signature, limit_bytes))

    def _planned(self, signature: CallSignature, limit_bytes: int | None) -> tuple[Traced, Plan]:
        """The function in the form that was chosen, and its plan within ``limit_bytes`` a device."""
        search = partial(self._searched, self._traced[signature], limit_bytes)
        return planned_by_types(self._placements, signature, search, self.options.constraints)

    def _searched(self, traced: Traced, limit_bytes: int | None) -> tuple[Traced, Plan]:
        problem, step = self.searched(traced, limit_bytes)
        step.meter.add(Work.TRACED, len(traced.graph.operators))
        is_staged = problem.subproblem.on_workers or problem.names_pipeline
        decision = self._decision(problem, step, self._counts(traced.graph))
        if is_staged:
            plan = plan_on_workers(decision)
        else:
            o = self.options
            tries_pipelines = isinstance(o.search, str | Budgeted)
            plan = plan_step(decision, tries_pipelines=tries_pipelines, time_limit_s=o.time_limit_s)
        return step.form_of(plan), about(step.with_details(plan), traced)

    def searched(self, traced: Traced, limit_bytes: int | None) -> tuple[Problem, TracedStep]:
        """The planning problem with ``limit_bytes`` a device, and the traced step that planner techniques rewrite."""
        return self._whole_problem(traced, limit_bytes), self._step(traced, self.options.cluster or Cluster.local())

    def _step(self, traced: Traced, cluster: Cluster, split_step: SplitStep | None = None) -> TracedStep:
        donated, o = self.donated(traced), self.options
        without_flush, shared = updates_stagewise(o.schedule), SharedState.of_stages(o.like)
        return TracedStep(traced, donated, self._pins(traced), cluster.num_devices, split_step, without_flush, shared)

    def _decision(self, problem: Problem, step: TracedStep, counts: Sequence[int] | None) -> Decision:
        return Decision(problem, step, counts, self._strategy(), self._cache)

    def _whole_problem(self, traced: Traced, limit_bytes: int | None) -> Problem:
        """The problem with all that the user decided and wishes; what is None is free."""
        o = self.options
        on_workers, asked = isinstance(o.cluster, RayCluster), requested_stages(o)
        problem = self.problem(traced, limit_bytes)
        if asked is None and not cuts_stages(self._strategy()) and takes_one_stage(o, problem.cluster):
            asked = 1
        job = replace(problem.job, num_stages=asked, schedule=o.schedule, remat=o.requested_remat)
        subproblem = Subproblem(uniform_stages=on_workers and o.num_stages == "auto", on_workers=on_workers)
        return replace(problem, request=o.request, job=job, subproblem=subproblem)

    def _counts(self, graph: Graph) -> list[int] | None:
        """Numbers of microbatches that may be taken, the first is wanted; None where all may."""
        asked = self.options.num_microbatches
        return None if asked == "auto" else self._last_batch.counts(graph, int(asked), first=not self.planned)

    def _strategy(self) -> Strategy:
        search = self.options.search
        return strategy_named(search) if isinstance(search, str) else search

    @cached_property
    def _cache(self) -> PlanCache | None:
        """Plans on disk, as the environment says when the first plan is made."""
        return plan_cache(os.environ)

    def problem(self, traced: Traced, memory_limit_bytes: int | None, microbatches: int = 1) -> Problem:
        """The problem that the search is given."""
        o = self.options
        cluster = o.cluster or Cluster.local()
        donated = frozenset(traced.arguments[i][0] for i in self.donated(traced))
        placed = requested_placement(traced, o, self._placements[traced.signature])
        pinned = constraints_of(self._pins(traced), traced.graph, cluster.num_devices)
        return Problem(
            traced.graph,
            cluster,
            CostModel(cluster),
            job=Job(
                mesh_shape=o.mesh_shape or placed.mesh_shape,
                memory_limit_bytes=memory_limit_bytes,
                donated=donated,
                num_microbatches=microbatches,
                offload=o.offload,
                constraints=merged(placed.constraints, pinned),
            ),
            policy=o.thresholds,
            reporting=Reporting(log=o.progress),
            settings=context_text(traced.signature.context),
        )

    def _pins(self, traced: Traced) -> tuple[Pin, ...]:
        """Pins from the types of arguments, then those given by path: the last counts."""
        return (*self._placements[traced.signature].typed, *self.options.constraints)

    def donated(self, traced: Traced) -> tuple[int, ...]:
        """Indices of the traced leaves whose buffers the step may reuse."""
        positions, names = resolve(self.options.donate_argnums, self.options.donate_argnames, self.names)
        return tuple(
            i for i, (_, argument, _) in enumerate(traced.arguments) if argument in positions or argument in names
        )

    @shown
    def compile(self, signature: CallSignature) -> Compiled:
        """The program for a signature of `resolve`."""
        if signature in self.compiled:
            return self.compiled[signature]
        cluster = self.options.cluster
        if not isinstance(cluster, RayCluster):
            check_devices(self.options.plan, cluster, len(world_devices()))
        processes = many(self.options)
        traced, plan = self.plan(signature) if processes is None else self._plan_together(signature, processes)
        if isinstance(cluster, RayCluster):
            return self._compile_remote(signature, traced, plan, cluster)
        if processes is not None and (flushes(plan.schedule) or self.options.pipeline == "one_program"):
            check_flush(plan.schedule, "in several processes")
        check_effects(traced.graph)
        warn_of_unused(self._traced[signature].graph, self.donated(self._traced[signature]))
        clock = Clock()

        def build(planned: Planned[Traced]) -> LoadedProgram:
            with carried_out(planned.plan):
                return built(planned)

        def built(planned: Planned[Traced]) -> LoadedProgram:
            if planned.plan.num_stages > 1:
                stages = partial(
                    build_stages, planned.traced, planned.plan, self.donated(planned.traced), clock, self._say
                )
                if not takes_one_program(self.options, planned.plan):
                    return stages()
                try:
                    return stages(as_one=True)
                except OneProgramError:
                    if self.options.pipeline == "one_program":
                        raise
                    self._say("the stages cannot be one program; workers carry out their lists")
                    return stages()
            with clock.phase("lower"):
                program = lower(planned.traced, planned.plan, world_devices())
            self._say("compiling")
            with clock.phase("compile"):
                return load_local(planned.traced, program, self.donated(planned.traced))

        def search(memory_limit_bytes: int) -> Planned[Traced]:
            make, form = partial(self._planned, signature, memory_limit_bytes), partial(self._in_form_of, signature)
            with clock.phase("plan again"):
                if processes is None:
                    return Planned(*make())
                return share(processes, traced.graph.name, lambda: Planned(*make()), form, clock)

        limit = None if self.options.plan is not None else self.options.memory_limit_bytes
        try:
            final, local = build_within(Planned(traced, plan), limit, build, search, self.options.policy)
        except OneProgramError:
            if self.options.num_stages != "auto" or self.options.plan is not None:
                raise
            return self._compile_one_stage(signature)
        kept = replace(plan, content=final.plan.content)
        return self._keep(signature, final.traced, kept, clock, local)

    @shown
    def compile_with(self, signature: CallSignature, compiler_options: Mapping[str, Any]) -> Compiled:
        """The program for a signature of `resolve` with options of XLA; it is not the one of later calls.

        Args:
            signature: of the call.
            compiler_options: besides those of the plan.

        Raises:
            AutoparError: several programs are compiled, or another process does it.
        """
        cluster = self.options.cluster
        if not isinstance(cluster, RayCluster):
            check_devices(self.options.plan, cluster, len(world_devices()))
        traced, plan = self.plan(signature)
        if isinstance(cluster, RayCluster) or many(self.options) is not None or plan.num_stages > 1:
            raise AutoparError(
                "compiler_options are for the program of one stage in one process",
                cause="the plan has several programs, or other processes compile them",
                remedy="num_stages=1, or XLA_FLAGS in the environment of all processes",
            )
        check_effects(traced.graph)
        with carried_out(plan):
            program = lower(traced, plan, world_devices())
            program = replace(program, compiler_options={**program.compiler_options, **compiler_options})
            local = load_local(traced, program, self.donated(traced))
        return Compiled(plan, traced, local, self.fn, self.signature_options)

    def _compile_one_stage(self, signature: CallSignature) -> Compiled:
        """The program of the best plan of one stage, where nobody asked for more and several cannot be one program."""
        self._say("stages cannot be one program in several processes; planning one stage")
        single = PureFunction(self.fn, replace(self.options, num_stages=1))
        single._traced[signature] = self._traced[signature]
        self.compiled[signature], self.planned[signature] = single.compile(signature), single.planned[signature]
        return self.compiled[signature]

    def _compile_remote(self, signature: CallSignature, traced: Traced, plan: Plan, cluster: RayCluster) -> Compiled:
        """The program for a signature on workers in other processes."""
        with carried_out(plan):
            return self._on_workers(signature, traced, plan, cluster)

    def _on_workers(self, signature: CallSignature, traced: Traced, plan: Plan, cluster: RayCluster) -> Compiled:
        check_for_workers(plan, cluster)
        check_effects(traced.graph)
        clock = Clock()
        if updates_stagewise(plan.schedule):
            without_flush = build_without_flush_on_workers(traced, plan, cluster, clock, self.options.progress)
            return self._keep(signature, traced, plan, clock, without_flush)
        with clock.phase("lower"):
            split_step = split_layers(traced, plan.content.stack_groups)
            lowered = lower_pipeline(split_step.step, plan, platform=cluster.run.platform)

        def replan(smaller: RayCluster) -> LoweredPipeline:
            other = self._pipeline_on(smaller, traced, split_step, plan)
            return lower_pipeline(split_step.step, other, platform=cluster.run.platform)

        with clock.phase("compile"):
            remote = load_remote(
                traced, split_step, lowered, cluster, self.donated(traced), self.options.progress, replan
            )
        return self._keep(signature, traced, plan, clock, remote)

    def _pipeline_on(self, cluster: RayCluster, traced: Traced, split_step: SplitStep, before: Plan) -> Plan:
        """The best pipeline for fewer workers than ``before`` was made for; what was asked for holds where it can."""
        o = self.options
        stages = cluster.num_stages if isinstance(o.num_stages, str) else min(int(o.num_stages), len(cluster.slots))
        step = self._step(traced, cluster, split_step)
        whole = self._whole_problem(traced, o.memory_limit_bytes)
        problem = replace(whole, cluster=cluster, cost_model=whole.cost_model.on(cluster))
        asked, side_by_side = replace(problem.job, num_stages=stages), asks_for_branches(before.schedule)
        like, count = problem if side_by_side else replace(problem, job=asked), [before.num_microbatches]
        decision = self._decision(like, step, count)
        try:
            return fastest(like, [decision.several.branches() if side_by_side else decision.several.pipelines()])
        except (InfeasiblePlanError, MicrobatchError, ScheduleError):
            job = replace(problem.job, num_stages=stages if side_by_side else None, schedule="auto")
            free = replace(problem, job=job)
            return fastest(free, [self._decision(free, step, None).several.pipelines()])

    def _keep(
        self, signature: CallSignature, traced: Traced, plan: Plan, clock: Clock, local: LoadedProgram
    ) -> Compiled:
        """Remembers a compiled signature."""
        plan = replace(plan, phases=(*plan.phases, *clock.phases()))
        self.planned[signature] = traced, plan
        self.compiled[signature] = Compiled(plan, traced, local, self.fn, self.signature_options)
        return self.compiled[signature]

    def _say(self, text: str) -> None:
        if self.options.progress is not None:
            self.options.progress(text)


def input_tree(traced: Traced) -> Callable[[list[Any]], Any]:
    """Specs of the inputs as a pytree like the arguments; by path where a container refuses them."""
    signature = traced.signature
    paths = [path for path, _, _ in traced.arguments]

    def tree(specs: list[Any]) -> Any:
        try:
            args, kwargs = signature.arguments(specs[: len(paths)])
        except Exception:
            return dict(zip(paths, specs, strict=False))
        return (args, kwargs) if kwargs else args

    return tree


def requested_stages(options: ParallelOptions) -> int | None:
    """Number of stages that is asked for: as a number, by ``like``, or as workers on Ray; None where it is free."""
    asked = None if options.num_stages == "auto" else int(options.num_stages)
    if (shared := SharedState.of_stages(options.like)) is not None:
        asked = shared.checked_stages(options.cluster, options.num_stages)
    if isinstance(options.cluster, RayCluster) and asked is None and not asks_for_branches(options.schedule):
        return options.cluster.num_stages
    return asked
