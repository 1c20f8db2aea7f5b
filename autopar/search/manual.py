"""`Manual`: prices the plan that a person names by its degrees of parallelism.

`Manual` is the strategy; `NamedLayouts` says which layouts of inputs suit the named plan, among them those of
parameters that replicas share, as with ZeRO-3, and of dims that number experts. Tokens are found by
`autopar.search.batch_dims`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, cast

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.errors.names import counted
from autopar.ir import Graph, Input, Layout, Operator
from autopar.ir.loops import Scan
from autopar.microbatch import batch_size, even_counts
from autopar.plan import Plan
from autopar.recompute import LEVELS, Level
from autopar.schedule import Task, get, table_of
from autopar.search.assemble import renamed
from autopar.search.batch_dims import (
    SharedExamples,
    SharedMatrices,
    SharedTokens,
    check_tokens,
    origins,
    token_dims,
    where_any,
)
from autopar.search.clock import Clock
from autopar.search.outcome import within_reach
from autopar.search.pipeline.candidates import Candidate, CuttableStep, schedule_of
from autopar.search.pipeline.partition import even_stages
from autopar.search.pipeline.plan_candidate import plan_candidate
from autopar.search.problem import Problem
from autopar.search.restrict import AllowedResults, Restricted, restricted_plan, solve_restricted
from autopar.stages import cluster
from autopar.stages.parts import StageValue, StageValueKind

#: By value: the parameter that it is, cast or turned, and for each of its dims that of the parameter.
_Origins: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Manual:
    """A strategy with one plan: the one that is named. ``autopar.parallelize(fn, search=Manual(tp=4, dp=2))``.

    The mesh has an axis for dp, one for cp and one for tp, tp the nearest devices. Batch arguments are split over dp on
    their first dim, and so is what of the batch meets a matrix in a product; parameters and their optimizer state over
    tp on a dim that the integer program chooses, with everything between them: it splits activations over tp, which is
    sequence parallelism, wherever that is cheaper. Examples are never split over tp, nor what of the batch meets a
    matrix in a product, and each device has a part of every such product. From their ZeRO stage on, optimizer state
    (1), gradients that microbatches add up (2) and parameters (3) are split over dp on a dim that it chooses. In one
    microbatch gradients are reduced into the layout of the state at once, so that stages 1 and 2 are one plan there,
    and a note says so; in several each microbatch reduces its own from stage 2 on. At stage 3 parameters are gathered
    by what reads them, a layer at a time in loops over layers, and products with them have the batch split over dp.

    With ep the devices of dp have two axes: replicas and, nearer, devices that share experts. Parameters with a dim of
    experts (see `autopar.search.manual`) and their state are split over the latter on that dim; how tokens come to
    them and back is the integer program's choice, which is an all-to-all where it is cheapest.

    With cp batch arguments that have a dim of tokens (see `autopar.search.batch_dims`) are split over cp on it,
    parameters are whole over cp, and ZeRO splits over dp and cp together. Products with parameters have tokens split
    over cp, and nothing has examples split over it, as it would be if cp were more of dp. All else is the integer
    program's choice: in attention it may gather keys and values over cp, or give each device other heads. A stage of a
    pipeline takes what others send it split over cp on its dim of tokens, if it has one that cp divides.

    Args:
        tp: devices that share the matrices of a layer.
        pp: pipeline stages; the mesh of each has the axes of dp, cp and tp.
        dp: replicas that share the batch.
        cp: devices that share the tokens of an example.
        ep: devices, of those of dp, that share experts.
        zero: ZeRO stage, 0 to 3.
        sequence_parallel: of no effect on a graph, see above.
        recompute: "none": what the function states with `jax.checkpoint`, and what ``parallelize(remat=)`` names;
            "selective", "full".
        chunks: chunks of each pipeline stage.

    Raises:
        InfeasiblePlanError: a number is impossible.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    chunks: int = 1
    names_plan = True

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InfeasiblePlanError(f"Manual({name}={value!r}) is no count", remedy="give 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise InfeasiblePlanError(f"Manual(zero={self.zero!r})", remedy="ZeRO has the stages 0, 1, 2 and 3")
        if self.recompute not in ("none", "selective", "full"):
            raise InfeasiblePlanError(
                f"Manual(recompute={self.recompute!r})", remedy="one of 'none', 'selective', 'full'"
            )

    def __call__(self, problem: Problem) -> Plan:
        """The plan; see `plan`."""
        return self._staged(problem) if self.pp > 1 else self.plan(problem, "manual")

    @property
    def cuts_stages(self) -> bool:
        """Whether the plan has several stages."""
        return self.pp > 1

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the plan."""
        return self.pp * self.chunks

    def _staged(self, problem: Problem) -> Plan:
        """The plan of ``pp * chunks`` stages with equal FLOPs, as near as whole blocks make it, on ``pp`` equal
        submeshes of tp, cp and dp.

        The schedule is 1F1B, or interleaved 1F1B with chunks, unless another is asked for.

        Raises:
            InfeasiblePlanError: the problem cannot be cut so.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        stages, devices, asked = self.num_stages, problem.cluster.num_devices, problem.job.num_stages
        if asked not in (None, self.pp, stages):
            raise InfeasiblePlanError(
                f"Manual(pp={self.pp}, chunks={self.chunks}) names {stages} stages; {asked} are asked for",
                remedy=f"leave num_stages out, or num_stages={stages}",
            )
        if problem.source is None:
            raise InfeasiblePlanError(
                f"Manual(pp={self.pp}) cannot cut {problem.graph.name} into stages",
                cause="the problem was made from a graph alone",
                remedy="plan by autopar.parallelize(...).plan(...)",
            )
        self._check_devices(problem)
        schedule = problem.job.schedule
        if schedule in ("auto", "none"):
            schedule = get("interleaved", chunks=self.chunks) if self.chunks > 1 else "1f1b"
        job = replace(problem.job, num_stages=stages, schedule=schedule, remat=self._remat(problem))
        staged = replace(problem, job=job)
        policy = problem.policy.enumeration
        count = job.num_microbatches or self._microbatches(problem.graph, policy.most_microbatches_per_stage * stages)
        wanted = min(policy.layers_per_stage * stages, max(stages, policy.most_layers))
        layers = cluster(problem.graph, problem.source.microbatches(count), wanted, fewest=stages, stages=stages)
        if len(layers.members) < stages:
            raise InfeasiblePlanError(
                f"{problem.graph.name} has {counted(len(layers.members), 'layer')}, fewer than pp * chunks = {stages}",
                remedy="fewer stages or chunks",
            )
        table, per = table_of(schedule_of(staged), stages, count), devices // self.pp
        placements = tuple((table.worker_of(Task("forward", s, 0)) * per, per) for s in range(stages))
        candidate = Candidate(count, even_stages(layers, stages), placements, 0.0, layers.recomputed)
        inside = _ManualStages(replace(self, pp=1, chunks=1, recompute="none"), self._tokens(problem.graph))
        return renamed(within_reach(plan_candidate(CuttableStep(staged, problem.source, inside), candidate)), "manual")

    def _microbatches(self, graph: Graph, most: int) -> int:
        """The most microbatches up to a number whose examples dp divides; the fewest where it divides none."""
        size, counts = batch_size(graph) or 1, even_counts(graph)
        return max((n for n in counts if n <= most and size // n % self.dp == 0), default=counts[0])

    def plan(self, problem: Problem, name: str, tokens: Mapping[str, int] | None = None) -> Plan:
        """The plan, under the name of a strategy.

        Args:
            problem: what is planned, as one stage.
            name: of the strategy.
            tokens: by batch input the dim of its tokens, which cp divides; None finds them.

        Raises:
            InfeasiblePlanError: the plan does not suit the cluster or the program, or does not fit its memory.
        """
        clock = Clock()
        return restricted_plan(problem, self.solve(problem, clock, tokens), name, clock, self.notes(problem))

    def solve(self, problem: Problem, clock: Clock, tokens: Mapping[str, int] | None = None) -> Restricted:
        """The integer program restricted to layouts of the named degrees, with its solution.

        Args:
            problem: what is planned, as one stage.
            clock: takes the time of phases.
            tokens: by batch input the dim of its tokens, which cp divides; None finds them.

        Raises:
            InfeasiblePlanError: the degrees do not suit the cluster or the program.
        """
        self._check(problem)
        check_batch(problem, self.dp)
        graph, mesh = problem.graph, self.mesh(problem)
        axes = self._axes(mesh)
        tokens = self._tokens(graph) if tokens is None else tokens
        experts = expert_state(graph, expert_dims(graph)) if axes.ep else {}
        rules = NamedLayouts(graph, axes, self.zero, tokens, experts, problem.policy.enumeration.small_state_share)
        return solve_restricted(problem, mesh, rules.allowed, clock, _made(graph, tokens, axes, self.zero))

    def _remat(self, problem: Problem) -> Level:
        """The level of recomputation: that of ``recompute``, or the one that ``parallelize(remat=)`` asks for."""
        asked, named = problem.job.remat, self.recompute
        level = next(level for level in LEVELS if level == named)
        if asked in ("auto", "none", named):
            return level
        if named != "none":
            raise InfeasiblePlanError(
                f"Manual(recompute={named!r}) and remat={asked!r} name different levels",
                remedy="give one of them",
            )
        return next(known for known in LEVELS if known == asked)

    def _tokens(self, graph: Graph) -> dict[str, int]:
        """Dim of the tokens of each value of a whole step, empty without cp. Raises where cp does not divide them."""
        if self.cp == 1:
            return {}
        dims = token_dims(graph)
        check_tokens(graph, dims, self.cp)
        return dims

    def mesh(self, problem: Problem) -> LogicalMesh:
        """The logical mesh: axes of dp (of replicas, and of experts), cp and tp, those of one device left out."""
        (mesh,) = problem.cluster.logical_meshes(self._sizes or (1,))
        return mesh

    def _check_devices(self, problem: Problem) -> None:
        """Raises InfeasiblePlanError unless the product of the degrees is the number of devices."""
        n, named = problem.cluster.num_devices, (("pp", self.pp), ("tp", self.tp), ("cp", self.cp), ("dp", self.dp))
        degrees = {name: k for name, k in named if k > 1 or name in ("tp", "dp")}
        asked = math.prod(degrees.values())
        if asked != n:
            product = " times ".join(f"{name}={k}" for name, k in degrees.items())
            owner = "a stage" if problem.subproblem.separate_programs else problem.cluster.name
            raise InfeasiblePlanError(
                f"{product} are {counted(asked, 'device')}; {owner} has {n}",
                remedy=f"numbers whose product is {n}, or another cluster",
            )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(n for n in (self.dp // self.ep, self.ep, self.cp, self.tp) if n > 1)

    def _axes(self, mesh: LogicalMesh) -> NamedAxes:
        names = list(mesh.names)
        tp = names.pop() if self.tp > 1 else None
        cp = names.pop() if self.cp > 1 else None
        return NamedAxes(tuple(names) if self.dp > 1 else (), names[-1] if self.ep > 1 else None, cp, tp)

    def notes(self, problem: Problem) -> tuple[str, ...]:
        """Notes for readers of the plan of a problem."""
        grid = [f"{k}={getattr(self, k)}" for k in ("tp", "cp", "dp", "ep", "zero") if getattr(self, k) > (k != "zero")]
        notes = [f"named by hand: {', '.join(grid) or 'one device'}"]
        if self.zero and self.dp * self.cp == 1:
            notes.append(f"zero={self.zero} splits nothing: dp and cp are 1, and no two devices hold the same state")
        elif self.zero in (1, 2) and not any(i.role == "optimizer" and i.type.rank for i in problem.graph.inputs):
            if self.zero == 1 or not origins(problem.graph).accumulated:
                notes.append(f"zero={self.zero} splits nothing: the step has no optimizer state")
        elif self.zero == 2 and not origins(problem.graph).accumulated:
            notes.append(
                "zero=2 is the plan of zero=1 here: in one microbatch no gradients are added up, and they are reduced "
                "into the parts of the optimizer state at once"
            )
        return tuple(notes)

    def _check(self, problem: Problem) -> None:
        if self.chunks > 1:
            raise InfeasiblePlanError(
                f"Manual(chunks={self.chunks}) has one stage a device, which is not cut into chunks",
                remedy="leave chunks out, or give pp",
            )
        if self.recompute != "none":
            raise InfeasiblePlanError(
                f"Manual(recompute={self.recompute!r}) is for pipelines: one stage is rewritten before it is planned",
                remedy=f"parallelize(..., remat={self.recompute!r}), or jax.checkpoint in the function",
            )
        if self.ep > 1:
            self._check_experts(problem)
        self._check_devices(problem)
        most_axes = problem.policy.enumeration.most_mesh_axes
        if len(self._sizes) > most_axes:
            raise InfeasiblePlanError(
                f"tp={self.tp}, cp={self.cp}, dp={self.dp}, ep={self.ep} make a mesh of {len(self._sizes)} axes; "
                f"at most {most_axes} can be planned",
                cause="an operator has so many strategies on more that the integer program does not fit in memory",
                remedy=f"ep={self.dp}, which leaves no axis of replicas, or leave out one of tp, cp and ep",
            )

    def _check_experts(self, problem: Problem) -> None:
        if self.dp % self.ep:
            raise InfeasiblePlanError(f"ep={self.ep} does not divide dp={self.dp}", remedy="a number that divides dp")
        dims = expert_dims(problem.graph)
        types = {i.name: i.type for i in problem.graph.inputs}
        counts = sorted({types[name].shape[d] for name, d in dims.items()})
        if not any(n % self.ep == 0 for n in counts):
            raise InfeasiblePlanError(
                f"{problem.graph.name} has no experts that {self.ep} devices can share: "
                + (f"there are {', '.join(map(str, counts))}" if counts else "no parameter has a dim of experts"),
                cause="experts are a batch dim of products of a parameter with activations",
                remedy="another ep, or leave it out",
            )


@dataclass(frozen=True)
class _ManualStages:
    """Plans the stages of a pipeline.

    Args:
        manual: the plan of each.
        tokens: by value of the whole step the dim of its tokens.
    """

    manual: Manual
    tokens: Mapping[str, int]

    def __call__(self, problem: Problem) -> Plan:
        """The plan of a stage, whose inputs are named as `StageValue` says."""
        kinds: tuple[StageValueKind, ...] = ("step", "piece", "from")
        of_inputs = {str(StageValue(kind, n)): dim for n, dim in self.tokens.items() for kind in kinds}
        tokens = {}
        for i in problem.graph.inputs:
            dim = of_inputs.get(i.name)
            if dim is not None and i.type.shape[dim] % self.manual.cp == 0:
                tokens[i.name] = dim
        return self.manual.plan(problem, "manual", tokens)


def _made(graph: Graph, tokens: Mapping[str, int], axes: NamedAxes, zero: int) -> AllowedResults | None:
    """Layouts in which values may be made; None for all."""
    rules: list[AllowedResults] = []
    if axes.cp:
        rules.append(SharedTokens.of(graph, tokens, axes.cp).allowed)
    if axes.tp:
        rules.append(SharedMatrices.of(graph, axes.tp).allowed)
    replicas = tuple(a for a in axes.dp if a != axes.ep)
    if replicas:
        rules.append(SharedExamples.of(graph, replicas).allowed)
    parts = (*replicas, axes.cp) if axes.cp else replicas
    if zero == 3 and parts:
        rules.append(PartitionedParameters.of(graph, parts).allowed)
    if zero == 2 and parts and (gradients := origins(graph).accumulated):
        rules.append(PartitionedParameters(parts, gradients).allowed)
    if not rules:
        return None

    def allowed(key: str, layouts: Sequence[Layout]) -> list[bool]:
        ok = [True] * len(layouts)
        for rule in rules:
            both = [a and b for a, b in zip(ok, rule(key, layouts), strict=True)]
            ok = both if any(both) else ok
        return ok

    return allowed


def manual(problem: Problem) -> Plan:
    """`Manual` without arguments of its own: data parallelism over all devices, state whole."""
    return Manual(dp=problem.cluster.num_devices)(problem)


def check_batch(problem: Problem, parts: int) -> None:
    """Raises InfeasiblePlanError unless ``parts`` devices divide the first dim of every batch argument."""
    for i in problem.graph.inputs:
        if i.role == "batch" and i.type.rank and i.type.shape[0] % parts:
            size = i.type.shape[0]
            raise InfeasiblePlanError(
                f"{i.name} {i.type} has a first dim of {size}, which {parts} devices do not divide",
                cause="data parallelism gives each device the same number of examples",
                remedy=f"a batch of {size // parts * parts} or {(size // parts + 1) * parts}, another number of "
                "devices, or search='alpa'",
            )


def expert_dims(graph: Graph) -> dict[str, int]:
    """Dim of the experts of each parameter that has one.

    A dim of a parameter is one of experts where a product of the parameter with an activation takes it as a batch dim:
    for each index along it there is a matrix of its own, used on activations of its own.

    Args:
        graph: a train step; loops over stacked layers are looked into.
    """
    dims: dict[str, int] = {}
    start = {i.name: (i.name, tuple(range(i.type.rank))) for i in graph.inputs if i.role == "parameter"}
    _follow_origins(graph, start, dims)
    return dims


def _follow_origins(graph: Graph, origins: _Origins, by_input: dict[str, int]) -> None:
    for op in graph.operators:
        known = [origins.get(o) if isinstance(o, str) else None for o in op.operands]
        if op.primitive == "dot_general":
            _product(op, known, by_input)
        elif op.primitive == "transpose" and known[0] is not None:
            name, dims = known[0]
            origins[op.results[0].name] = name, tuple(dims[d] for d in op.ints("permutation"))
        elif op.primitive in ("convert_element_type", "copy", "stop_gradient") and known[0] is not None:
            origins[op.results[0].name] = known[0]
        elif op.primitive == "scan":
            scan = Scan.of(op)
            inner: _Origins = {}
            for n, (entry, origin) in enumerate(zip(scan.body.inputs, known, strict=True)):
                if origin is not None:
                    inner[entry.name] = (origin[0], origin[1][1:]) if n >= scan.num_whole else origin
            _follow_origins(scan.body, inner, by_input)


def _product(op: Operator, known: list[tuple[str, tuple[int, ...]] | None], by_input: dict[str, int]) -> None:
    _, batch = cast("tuple[object, tuple[tuple[int, ...], ...]]", op.attr("dimension_numbers"))
    for origin, other, dims in zip(known, reversed(known), batch, strict=True):
        if origin is not None and other is None and dims:
            by_input.setdefault(origin[0], origin[1][dims[0]])


def expert_state(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """``dims`` and those of optimizer state that has the shape of such a parameter.

    Args:
        graph: the train step.
        dims: from `expert_dims`.
    """
    by_shape = {i.type.shape: dims[i.name] for i in graph.inputs if i.name in dims}
    state = {i.name: by_shape[i.type.shape] for i in graph.inputs if i.role == "optimizer" and i.type.shape in by_shape}
    return {**state, **dims}


@dataclass(frozen=True)
class PartitionedParameters:
    """Layouts of values where each device keeps a part of every parameter, and whole ones do not stay.

    A parameter is gathered by what reads it, and its copy ends with that (Rajbhandari et al., "ZeRO", 2020, section
    5.3). So what loops take of parameters is split, or whole copies of all layers would lie in memory, and so is what
    they carry and stack of gradients; what they stack of activations is split anyway, as the batch is.

    Args:
        parts: mesh axes whose devices have parts of a parameter.
        kept: keys of what loops and branches take of parameters, and of sums of gradients, see
            `autopar.search.batch_dims.Origins`.
    """

    parts: tuple[str, ...]
    kept: Collection[str]

    @staticmethod
    def of(graph: Graph, parts: tuple[str, ...]) -> PartitionedParameters:
        """Finds the parameters of a train step, or of a stage of one."""
        labels_of = origins(graph)
        return PartitionedParameters(parts, labels_of.entering | labels_of.sums | labels_of.accumulated)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        ok = [True] * len(layouts)
        if key in self.kept:
            for axis in self.parts:
                ok = where_any(ok, [any(axis in split for split in k.dims) for k in layouts])
        return ok


@dataclass(frozen=True)
class NamedAxes:
    """The mesh axes of the degrees of parallelism; None, or none, where a degree is 1.

    Args:
        dp: those that share the batch, major first.
        ep: the last of ``dp``, where its devices share experts.
        cp: that of devices that share the tokens of an example.
        tp: that of devices that share the matrices of a layer.
    """

    dp: tuple[str, ...] = ()
    ep: str | None = None
    cp: str | None = None
    tp: str | None = None


@dataclass(frozen=True)
class NamedLayouts:
    """Layouts that inputs may have.

    Args:
        graph: what is planned.
        axes: what each mesh axis is for.
        zero: ZeRO stage, 0 to 3.
        tokens: by batch input the dim of its tokens, where it has one.
        experts: by parameter and optimizer state the dim of its experts, where it has one.
        small_state_share: of all parameters: less of state may stay whole under tensor parallelism.
    """

    graph: Graph
    axes: NamedAxes
    zero: int
    tokens: Mapping[str, int]
    experts: Mapping[str, int]
    small_state_share: float

    def allowed(self, i: Input, layouts: Sequence[Layout]) -> list[bool]:
        """Whether input ``i`` may have each layout; one or more are true."""
        axes = self.axes
        over_cp = (axes.cp,) if axes.cp else ()
        if i.role == "batch":
            wanted = [axes.dp, *[()] * (i.type.rank - 1)] if i.type.rank else []
            if i.name in self.tokens:
                wanted[self.tokens[i.name]] += over_cp
            return [k.dims == tuple(wanted) for k in layouts]
        if i.role not in ("parameter", "optimizer"):
            return [k.is_replicated for k in layouts]
        over_dp = self.zero >= (3 if i.role == "parameter" else 1)
        ok, free = [True] * len(layouts), (*axes.dp, *over_cp)
        expert = self.experts.get(i.name)
        if expert is not None:
            among = [k.dims[expert][:1] == (axes.ep,) for k in layouts]
            if any(among):
                ok, free = among, tuple(a for a in free if a != axes.ep)
        for axis in free:
            ok = _split(layouts, ok, axis, must=over_dp, may=over_dp)
        large = i.type.nbytes >= self.small_state_share * self._parameter_bytes
        return _split(layouts, ok, axes.tp, must=i.type.rank > 1 and large, may=True)

    @cached_property
    def _parameter_bytes(self) -> int:
        return sum(i.type.nbytes for i in self.graph.inputs if i.role == "parameter")


def _split(layouts: Sequence[Layout], ok: Sequence[bool], axis: str | None, *, must: bool, may: bool) -> list[bool]:
    """``ok`` where also ``axis`` splits the layout if it must (and some can), and does not unless it may."""
    has = [axis in k.axes for k in layouts]
    if must and any(a and b for a, b in zip(ok, has, strict=True)):
        return [a and b for a, b in zip(ok, has, strict=True)]
    return [a and (may or not b) for a, b in zip(ok, has, strict=True)]
