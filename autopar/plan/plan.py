"""`Plan`: the answer of a search, printable, comparable and reloadable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from autopar._compat.files import write_whole
from autopar._compat.meshes import device_mesh, local_devices, partition_spec
from autopar.errors import PlanMismatchError
from autopar.errors.names import counted
from autopar.ir import Layout
from autopar.plan.alternatives import TOPICS, topic_text
from autopar.plan.arguments import axis_rules
from autopar.plan.codec import decode, encode
from autopar.plan.columns import columns, hanging
from autopar.plan.content import PlanContent
from autopar.plan.counterfactuals import ALTERNATIVE, MOST_OPERATORS, Counterfactuals
from autopar.plan.details import NO_DETAILS, Details
from autopar.plan.pipeline import Pipeline
from autopar.plan.text import (
    bytes_text,
    executions_text,
    explain_text,
    gap_of,
    html_summary,
    plan_text,
    seconds_text,
)
from autopar.plan.throughput import Throughput, throughput
from autopar.plan.trail import TrailRow
from autopar.plan.types import Communication, Considered, Stage


@dataclass(frozen=True)
class SearchRecord:
    """Record of the search that found the plan.

    Args:
        strategy: registered name of the search.
        objective: predicted seconds that it minimized.
        lower_bound: seconds that no plan of its problem can beat, over all that was free; None where nothing was
            proven.
        considered: other options, as logical mesh shapes.
        seconds: seconds that it took; None in a plan that was loaded.
        phases: (phase, seconds) of planning, in order; empty in a plan that was loaded.
        step_time: predicted seconds of a step of the plan.
        incumbents: (seconds since planning began, predicted seconds of a step) of each plan that was the best known,
            in order; empty in a plan that was loaded or asked for by name.
        work: work units that the search took, the same on every machine and under any load: about 10 ns of a core each.
        work_by_kind: (kind of work, units) of them.
        trail: what became of the regions of the decision, at most some 60 rows; see `TrailRow`.
    """

    strategy: str
    objective: float
    lower_bound: float | None
    considered: tuple[Considered, ...]
    seconds: float | None
    phases: tuple[tuple[str, float], ...]
    step_time: float
    incumbents: tuple[tuple[float, float], ...] = ()
    work: int = 0
    work_by_kind: tuple[tuple[str, int], ...] = ()
    trail: tuple[TrailRow, ...] = ()

    @property
    def gap(self) -> float | None:
        """(step time - lower bound) / step time; None without a bound."""
        return gap_of(self.lower_bound, self.step_time)


@dataclass(frozen=True, repr=False)
class Plan:
    """The decisions for one program on one cluster.

    Equal plans compare equal; times of the search and the Python structure of the arguments are not part of that. Made
    by a search, or by `from_json` and `load`.

    Args:
        content: everything that its file holds.
        phases: (phase, seconds) of planning.
        input_tree: structure of the arguments; None in a plan that was loaded.
        details: what is shown of operators besides their sharding.
        again: the search, for what is asked later; None in a plan that was loaded.
        incumbents: (seconds since planning began, step time) of each plan that was the best known, in order; empty for
            a loaded one.
        unproven: the plan was read from a file without the digest of its content: an older one, or one that was
            changed. It runs once it is proven to compute what the program says.
    """

    content: PlanContent
    phases: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    input_tree: Any = field(default=None, compare=False)
    details: Details = field(default=NO_DETAILS, compare=False)
    again: Counterfactuals | None = field(default=None, compare=False)
    incumbents: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    unproven: bool = field(default=False, compare=False)

    def after(self, phases: Sequence[tuple[str, float]]) -> Plan:
        """The plan with phases, as (phase, seconds), that were there before its search."""
        before_s = sum(seconds for _, seconds in phases)
        incumbents = tuple((before_s + at_s, step_s) for at_s, step_s in self.incumbents)
        return replace(self, phases=(*phases, *self.phases), incumbents=incumbents)

    @property
    def step_time(self) -> float:
        """Predicted seconds a step."""
        return self.content.step_time

    @property
    def peak_memory(self) -> int:
        """Predicted bytes on the fullest device."""
        return self.content.peak_memory

    @property
    def throughput(self) -> Throughput:
        """Examples, tokens and dollars of a step, and its model FLOPs utilization."""
        return throughput(self.content)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return len(self.content.stages)

    @property
    def num_microbatches(self) -> int:
        """Parts of the batch that run one after another."""
        return self.content.num_microbatches

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule; "none" for one stage."""
        return self.content.schedule

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages in order."""
        return self.content.stages

    @property
    def pipeline(self) -> Pipeline | None:
        """Schedule table, works, values and transfers of several stages; None without a pipeline."""
        return self.content.pipeline

    @property
    def communication(self) -> tuple[Communication, ...]:
        """Collectives of a step, stage by stage, dearest first."""
        return tuple(c for s in self.content.stages for c in s.collectives)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines worth reading about the plan."""
        return self.content.notes

    @property
    def rewrites(self) -> tuple[str, ...]:
        """Lines on products that are computed in another order than the program says; see `parallelize`."""
        return self.content.rewrites

    @property
    def search(self) -> SearchRecord:
        """Record of the search that found the plan."""
        s = self.content.search
        seconds = sum(t for _, t in self.phases) if self.phases else None
        return SearchRecord(
            s.strategy,
            s.objective,
            s.lower_bound,
            s.considered,
            seconds,
            self.phases,
            self.step_time,
            self.incumbents,
            sum(units for _, units in self.details.work),
            self.details.work,
            self.details.trail,
        )

    @property
    def input_shardings(self) -> Any:
        """Pytree of `PartitionSpec` like the arguments ``(args, kwargs)``: ``args`` alone without kwargs.

        In a plan that was loaded, a flat dict from argument path to `PartitionSpec`.
        """
        specs = [partition_spec(Layout.parse(i.layout).dims) for i in self.content.inputs]
        if self.input_tree is None:
            return {i.path: spec for i, spec in zip(self.content.inputs, specs, strict=True)}
        return self.input_tree(specs)

    def partition_specs(self) -> Any:
        """`input_shardings`: a `PartitionSpec` for each argument, on the axes of `mesh`."""
        return self.input_shardings

    def logical_axis_rules(
        self, names: Mapping[str, Sequence[str | None]] | None = None, stage: int = 0
    ) -> list[tuple[str, str | tuple[str, ...] | None]]:
        """The arguments of a stage as logical axis rules of Flax and MaxText: (name of a dim, mesh axes or None).

        Args:
            names: for paths of arguments, or ends of paths, the logical name of each dim, as
                ``{"['kernel']": ("embed", "mlp")}``; None names each dim by its path and number.
            stage: number of the stage.

        Raises:
            PlanMismatchError: rules cannot say the plan: dims of one name are split over different axes.
        """
        return axis_rules(self.content, names, stage)

    def mesh(self, devices: Sequence[Any] | None = None, stage: int = 0) -> Any:
        """The `jax.sharding.Mesh` that the specs of a stage's arguments are on.

        Args:
            devices: jax devices in the order of the cluster; None takes those of this process.
            stage: number of the stage.

        Raises:
            PlanMismatchError: there is no such stage, or there are not as many devices as the plan wants.
        """
        if not 0 <= stage < self.num_stages:
            raise PlanMismatchError(f"the plan has no stage {stage}; it has {self.num_stages}")
        wanted = len({d for s in self.stages for d in s.devices})
        given = local_devices() if devices is None else devices
        if len(given) != wanted:
            raise PlanMismatchError(
                f"the plan is for {counted(wanted, 'device')} of {self.content.cluster_name}; there are {len(given)}",
                remedy="give as many devices, or plan for those that there are",
            )
        stage_plan = self.stages[stage]
        return device_mesh(stage_plan.mesh_axes, [given[i] for i in stage_plan.devices])

    @property
    def input_stages(self) -> dict[str, tuple[int, ...]]:
        """Stages that hold each argument leaf, or a part of it, by path; ``plan.content.inputs`` has the parts."""
        return {i.path: tuple(dict.fromkeys(r.stage for r in i.of_stages)) for i in self.content.inputs}

    def explain(self, what: str | None = None) -> str:
        """Why something is sharded as it is, as text.

        Args:
            what: id of an operator or path of an argument (a part of one is enough, and ``state/layers/*/w`` is one
                too); None for the most expensive choices. "stages", "microbatches", "schedule", "mesh" or "remat"
                tells the best of each alternative and what closed it; "pipeline" the prices of both ways in which
                several processes carry it out, where the plan has them.

        A runner-up's cost is with everything else as it is. Where the plan comes from a search in this process, has
        one stage, and ``what`` is one choice, the step is planned once more without that choice as well: what it
        takes with everything else chosen again, within the memory limit. Without ``what``, embedding tables that are
        arrays of their own are planned once more as `autopar.transforms.deal_tables` packs them, and told of where
        that step is faster.

        Raises:
            PlanMismatchError: nothing is called so; the message lists near names.
        """
        what = None if what is None else str(what)
        if what == "pipeline" and self.content.pipeline is not None and self.content.pipeline.executions is not None:
            return executions_text(self.content.pipeline.executions)
        if what in TOPICS:
            return hanging(topic_text(self.content, self.details.trail, what), columns())
        return explain_text(self.content, what, self.details, self.again)

    def with_alternatives(self) -> Plan:
        """The plan with the alternatives that people write by hand: data parallelism, ZeRO, Megatron, FSDP with TP.

        The alternatives are planned at the first call, in the form of this plan. Pages and the command line call it
        for programs of moderate size; ``print(plan)``, ``to_json`` and ``save`` do not.
        """
        known = self.content.search
        if self.again is None or any(o.note.startswith(ALTERNATIVE) for o in known.considered):
            return self
        considered = (*known.considered, *self.again.alternatives())
        search = msgspec.structs.replace(known, considered=considered)
        return replace(self, content=msgspec.structs.replace(self.content, search=search))

    @property
    def shown(self) -> Plan:
        """The plan as text and pages show it: with alternatives where they take seconds to plan."""
        operators = sum(len(s.operators) for s in self.stages)
        return self.with_alternatives() if operators <= MOST_OPERATORS else self

    def __reduce__(self) -> Any:
        """Pickled as what its file holds: a plan that comes back is equal, and knows no search."""
        return Plan.from_json, (self.to_json(),)

    def to_json(self) -> str:
        """The plan as JSON with a format version; the same plan gives the same text."""
        return encode(self.content, self.details.saved, proven=not self.unproven)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """The plan that `to_json` wrote. Raises PlanMismatchError on anything else."""
        return _read(text, "the text")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, whole or not at all. PlanMismatchError where the system does not let it."""
        try:
            write_whole(path, self.to_json())
        except OSError as error:
            folder = Path(path).absolute().parent
            raise PlanMismatchError(
                f"cannot write the plan {os.fspath(path)!r}: {error.strerror or error}",
                remedy=None if folder.is_dir() else f"make the folder {str(folder)!r} first",
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file. Raises PlanMismatchError where the file holds none."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanMismatchError(f"cannot read the plan {os.fspath(path)!r}: {error.strerror}") from error
        return _read(text, os.fspath(path))

    def check_program(self, fingerprint: str, program: str, names: Sequence[str] | None = None) -> None:
        """Raises PlanMismatchError unless the plan was made for this program.

        Args:
            fingerprint: of the program's graph.
            program: its name.
            names: paths of its inputs and ids of its operators, by which the plan's records are found; None
                leaves them unchecked.
        """
        if fingerprint != self.content.fingerprint or not (names is None or self._is_about(names)):
            raise PlanMismatchError(
                f"the plan was made for {self.content.program} ({self.content.fingerprint[:12]}), "
                f"not for {program} ({fingerprint[:12]})",
                cause="the function, its shapes or dtypes, or the version of a library changed since",
                remedy="plan again, and save the new plan",
            )

    def _is_about(self, names: Sequence[str]) -> bool:
        """Whether every record is of something in ``names``, or of something inside it."""
        known = set(names)
        loops = tuple(n + "/" for n in names if n.rpartition("/")[2].partition(".")[0] in ("scan", "while", "cond"))
        records = (*(i.path for i in self.content.inputs), *(r.id for r in self.content.operators))
        return all(r in known or r.startswith(loops) for r in records)

    def __str__(self) -> str:
        return plan_text(self.content, self.phases)

    def __repr__(self) -> str:
        c = self.content
        return (
            f"Plan({c.program!r} on {c.cluster_name!r}: {counted(len(c.stages), 'stage')}, "
            f"step {seconds_text(c.step_time)}, {bytes_text(c.peak_memory)} a device)"
        )

    def _repr_html_(self) -> str:
        return html_summary(self.content, self.phases)


def _read(text: str | bytes, origin: str) -> Plan:
    content, details, proven = decode(text, origin)
    return Plan(content, details=details, unproven=not proven)
