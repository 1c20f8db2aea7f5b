"""`lower_pipeline`: from a traced step and a plan with several stages to programs and instruction lists.

`cut_programs` is the step cut into programs, before anything is ordered, and `dataflow_of` what these read and write.
Plans without a flush go on in `autopar.lower.pipeline.without_flush`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from msgspec import structs

from autopar.errors import PlanMismatchError
from autopar.ir import Graph, Layout
from autopar.ir.analysis import calls_python
from autopar.ir.fingerprint import fingerprint
from autopar.lower.callbacks import Callbacks
from autopar.lower.pipeline.programs import stage_programs
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.pipeline.stage_program import StageProgram, kind_of
from autopar.lower.pipeline.stage_program import donated as donated_reads
from autopar.lower.program import sharded, where_memory_is_short
from autopar.lower.retrace import Step
from autopar.microbatch.tokens import analyze_tokens, check_lengths
from autopar.plan import Plan, PlanContent
from autopar.plan.pipeline import Lifetime, Reduce
from autopar.schedule import Dataflow, Program, Table, Task, ValueRef, ValueSpec, Work, WorkSpec, build, parse_table
from autopar.schedule.without_flush.schedules import updates_stagewise
from autopar.sharding.reshard import PathTables
from autopar.sharding.verify_plan import verify_plan, wrong_entry
from autopar.stages import StageMap
from autopar.stages.layers import forward_operators, members_of

_REDUCES: Mapping[str, Reduce] = {
    "sum": "sum", "max": "max", "min": "min", "concatenate": "concatenate", "and": "min", "or": "max",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class LoweredPipeline:
    """A pipeline, ready to be loaded on devices.

    Args:
        plan: what it carries out.
        map: stages of all operators.
        programs: of all stages.
        instructions: the lists of all workers.
        callbacks: how its programs call Python, and what has been raised there.
    """

    plan: Plan
    map: StageMap
    programs: tuple[StageProgram, ...]
    instructions: Program
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def table(self) -> Table:
        """The schedule."""
        return self.instructions.table

    def mesh_axes(self, stage: int) -> tuple[tuple[str, int], ...]:
        """Axes of a stage's mesh."""
        return self.plan.stages[stage].mesh_axes

    def devices(self, worker: int, stage: int) -> tuple[int, ...]:
        """Indices of the devices on which a worker runs a stage.

        A stage with two workers (Chimera) runs on each worker's own devices: those of the stage that the worker has in
        the plan.
        """
        if self.worker_of_stage(stage) == worker:
            return self.plan.stages[stage].devices
        stage_of_worker = next(s for s in range(self.table.num_stages) if self.worker_of_stage(s) == worker)
        return self.plan.stages[stage_of_worker].devices

    def worker_of_stage(self, stage: int) -> int:
        """The worker of a stage; of two the one that runs its first microbatch."""
        return self.table.worker_of(Task("forward", stage, 0))


def lower_pipeline(step: Step, plan: Plan, donated: Set[str] = frozenset(), platform: str = "cpu") -> LoweredPipeline:
    """Programs and instruction lists of ``plan``.

    Args:
        step: the step that it was made for: not in microbatches, its stacks taken apart as the plan says.
        plan: a plan with several stages.
        donated: names of the step's inputs whose buffers the caller gives up.
        platform: jax's name of the kind of devices.

    Raises:
        PlanMismatchError: the plan's cuts are not operators of the step.
    """
    cut = cut_programs(step, plan, platform)
    flow = cut.dataflow(donated)
    return LoweredPipeline(plan, cut.map, cut.programs, build(cut.table, flow), cut.callbacks)


@dataclass(frozen=True, eq=False)
class CutPrograms:
    """A step cut into programs as a plan says, before anything is ordered.

    Args:
        plan: what it carries out.
        table: its schedule.
        map: stages of all operators.
        programs: of all stages.
        sizes: by stage the sizes of its mesh axes.
        callbacks: how the programs call Python, and what has been raised there.
    """

    plan: Plan
    table: Table
    map: StageMap
    programs: tuple[StageProgram, ...]
    sizes: tuple[Mapping[str, int], ...]
    callbacks: Callbacks

    def dataflow(self, donated: Set[str] = frozenset(), more: Sequence[StageProgram] = ()) -> Dataflow:
        """Reads and writes of the programs.

        Args:
            donated: names of the step's inputs whose buffers the caller gives up.
            more: further programs.
        """
        offloaded_stages = frozenset(n for n, s in enumerate(self.plan.stages) if s.form.activations_offloaded)
        kinds = {s: sorted(k) for s, k in _kinds(self.table).items()}
        return dataflow_of((*self.programs, *more), self.sizes, kinds, donated, offloaded_stages, self.table.num_slices)


def cut_programs(step: Step, plan: Plan, platform: str, *, separate_state: bool = False) -> CutPrograms:
    """The programs of ``plan``, one for each kind of task of each stage.

    Args:
        step: the step that the plan was made for: not in microbatches, its stacks taken apart as the plan says.
        plan: a plan with several stages.
        platform: jax's name of the kind of devices.
        separate_state: whether an update is two programs: new state, and what else is returned.

    Raises:
        PlanMismatchError: the plan's cuts are not operators of the step.
    """
    content = plan.content
    if content.pipeline is None:
        raise PlanMismatchError("the plan has several stages and no record of its pipeline")
    table = parse_table(content.pipeline.table)
    scores = max(s.form.block_scores for s in plan.stages)
    source = TracedStages(step, updates_stagewise(plan.schedule), table.after, scores)
    microbatching = source.microbatches(plan.num_microbatches)
    forward = [op.id for op in forward_operators(step.graph, microbatching)]
    members = _checked(forward, content.pipeline.members) or members_of(forward, content.cuts)
    stages = [
        source.stage_graph(members, n, structs.replace(s.form, microbatches=plan.num_microbatches))
        for n, s in enumerate(plan.stages)
    ]
    if len(content.parts) != len(stages):
        raise wrong_entry("plan.parts", f"there are {len(stages)} stages")
    callbacks = Callbacks(by_buffers=platform == "cpu", guards=any(calls_python(s.graph) for s in stages))
    slices = None
    if content.pipeline.slice_lengths:
        slicing = analyze_tokens(step.graph)
        slices = slicing, check_lengths(content.pipeline.slice_lengths, slicing.tokens)
    programs: list[StageProgram] = []
    sizes: list[Mapping[str, int]] = []
    for stage, part in zip(stages, content.parts, strict=True):
        inputs = [Layout.parse(r.layout) for r in part.inputs]
        outputs = [Layout.parse(r.layout) for r in part.outputs]
        decisions = sharded(Plan(part), platform, callbacks)
        if plan.unproven:
            verify_stage(stage.graph, content, len(sizes), decisions.tables)
        of_stage = stage_programs(
            stage, decisions, inputs, outputs, split=table.splits_backward, separate_state=separate_state,
            slices=slices,
        )  # fmt: skip
        if plan.unproven:
            verify_reads(of_stage, f"plan.parts[{len(sizes)}]")
        options = tuple(where_memory_is_short(part, platform).items())
        programs += [replace(p, compiler_options=options) for p in of_stage]
        sizes.append(part.stages[0].mesh_shape)
    kinds = _kinds(table)
    wanted = tuple(
        p for p in programs if p.work.kind in ("before", "meeting", "update") or p.work.kind in kinds[p.work.stage]
    )
    map = source.slice(plan.num_microbatches, members).map
    return CutPrograms(plan, table, map, wanted, tuple(sizes), callbacks)


def verify_stage(graph: Graph, content: PlanContent, stage: int, tables: PathTables) -> None:
    """Raises PlanMismatchError, with the path of the first wrong entry, unless a plan is right about a stage.

    Args:
        graph: of the stage, in the form that the plan says.
        content: of the whole plan.
        stage: its number.
        tables: resharding paths of its mesh.
    """
    part, at = content.parts[stage], f"plan.parts[{stage}]"
    if part.fingerprint != fingerprint(graph):
        raise wrong_entry(f"{at}.fingerprint", "the stage has other operators, or another form")
    verify_plan(graph, part, tables, at)
    if content.stages[stage].mesh_axes != part.stages[0].mesh_axes:
        raise wrong_entry(f"plan.stages[{stage}].mesh_axes", f"the stage's plan has {part.stages[0].mesh_axes}")


def verify_reads(programs: Iterable[StageProgram], at: str) -> None:
    """Raises PlanMismatchError where the programs of a stage take an argument of the step as a partial sum.

    Args:
        programs: of the stage.
        at: path of its plan.
    """
    for port in (p for program in programs for p in program.reads):
        if port.ref.kind in ("in", "batch") and port.layout.partial:
            raise wrong_entry(f"{at}.operators", f"{port.ref.name} is taken as {port.layout}, and is no partial result")


def _checked(forward: Sequence[str], members: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """``members``, which are all operators of the forward pass where stages are a graph, and none elsewhere."""
    if members and sorted(id for stage in members for id in stage) != sorted(forward):
        raise PlanMismatchError(
            "the plan has other operators of the forward pass on its stages than the step has",
            cause="the function, its shapes, or the version of a library changed since",
            remedy="plan again, and save the new plan",
        )
    return members


def _kinds(table: Table) -> dict[int, set[str]]:
    """Kinds of tasks, by stage."""
    kinds: dict[int, set[str]] = {}
    for row in table.rows:
        for task in row:
            kinds.setdefault(task.stage, set()).add(task.kind)
    return kinds


def dataflow_of(
    programs: Sequence[StageProgram],
    sizes: Sequence[Mapping[str, int]],
    kinds: Mapping[int, Sequence[str]],
    donated: Set[str] = frozenset(),
    offloaded_stages: Set[int] = frozenset(),
    slices: int = 1,
) -> Dataflow:
    """Reads and writes of the programs of all stages.

    Args:
        programs: of all stages.
        sizes: by stage the sizes of its mesh axes.
        kinds: by stage the kinds of work that its tasks run; programs that are not there are empty.
        donated: names of the step's inputs that the caller gives up.
        offloaded_stages: stages whose microbatches wait for their backward pass in host memory.
        slices: slices of tokens of each microbatch.
    """
    values: dict[str, ValueSpec] = {}
    works = _empty_works(kinds, slices)
    read: set[str] = set()
    for program in programs:
        read.update(p.name for p in program.reads)
    for program in programs:
        stage = program.work.stage
        for port in program.writes:
            host = stage in offloaded_stages and port.ref.kind == "activation"
            values[port.name] = ValueSpec(
                port.name,
                port.local_bytes(sizes[stage]),
                _lifetime(port.ref),
                result=port.ref.kind == "out",
                host=host,
                ref=port.ref,
            )
        for port, reduce in program.accumulates:
            values[port.name] = ValueSpec(
                port.name, port.local_bytes(sizes[stage]), "accumulator", reduce=_REDUCES[reduce], ref=port.ref
            )
        works[program.work] = WorkSpec(
            program.work,
            tuple(dict.fromkeys(p.name for p in program.reads)),
            tuple(p.name for p in program.writes),
            tuple(p.name for p, _ in program.accumulates),
            aliases=_aliases(program, sizes[stage]),
        )
    for program in programs:
        stage = program.work.stage
        for port in program.reads:
            if port.name not in values:
                values[port.name] = ValueSpec(
                    port.name,
                    port.local_bytes(sizes[stage]),
                    _lifetime(port.ref),
                    stages=(stage,),
                    donated=port.ref.kind == "in" and port.ref.name in donated,
                    ref=port.ref,
                )
    return Dataflow(tuple(works[w] for w in sorted(works)), tuple(values.values()))


def _aliases(program: StageProgram, sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Arguments and results that share a buffer where the argument is given up; see `donated`."""
    at = donated_reads(program, {p.name for p in program.reads}, sizes)
    free, pairs = list(program.results), []
    for n in at:
        port = program.reads[n]
        result = next(p for p in free if kind_of(p, sizes) == kind_of(port, sizes))
        free.remove(result)
        pairs.append((port.name, result.name))
    return tuple(pairs)


def _empty_works(kinds: Mapping[int, Sequence[str]], slices: int) -> dict[Work, WorkSpec]:
    """All works that tasks run, as if none had a program."""
    numbers = range(slices)
    works = [Work(kind, s, k) for s, some in kinds.items() for kind in some for k in numbers]  # type: ignore[arg-type]
    return {work: WorkSpec(work) for work in works}


def _lifetime(ref: ValueRef) -> Lifetime:
    return "microbatch" if ref.kind in ("from", "batch", "activation") else "step"
