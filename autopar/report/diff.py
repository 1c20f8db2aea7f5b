"""Differences between two plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors.names import counted
from autopar.ir import Layout
from autopar.plan import Plan, PlanContent
from autopar.plan.text import bytes_text, pipeline_text, seconds_text
from autopar.plan.trail import stages_text
from autopar.report.sections import MEMORY_KINDS, Section


@dataclass(frozen=True)
class Figure:
    """One figure of both plans.

    Args:
        name: what it is.
        before: of the first plan.
        after: of the second plan.
        unit: "s" or "bytes".
    """

    name: str
    before: float
    after: float
    unit: str

    @property
    def differs(self) -> bool:
        """Whether the plans disagree on it."""
        return self.before != self.after

    def row(self) -> tuple[str, str, str, str]:
        """Name, both values and the change, as text."""
        show = seconds_text if self.unit == "s" else bytes_text
        change = "-"
        if self.differs:
            change = "new" if not self.before else f"{(self.after - self.before) / self.before:+.1%}"
        return self.name, show(self.before), show(self.after), change


@dataclass(frozen=True)
class Pair:
    """A fact or an argument that differs between two plans.

    Args:
        name: of the fact, or path of the argument.
        before: text of the first plan; None where it has no such entry.
        after: likewise of the second plan.
    """

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans.

    Args:
        identical: whether the plans are equal in everything, also in what is not listed here.
        facts: program, cluster, meshes, pipeline and search strategy, where they differ.
        figures: step time, memory by kind (of the fullest stage) and communication, all of them.
        inputs: argument leaves whose type, layout or stage differs, the sizes of the mesh axes written out.
        num_inputs: number of argument leaves of either plan.
    """

    identical: bool
    facts: tuple[Pair, ...]
    figures: tuple[Figure, ...]
    inputs: tuple[Pair, ...]
    num_inputs: int

    def sections(self) -> tuple[Section, ...]:
        """The tables that show it."""
        columns = ("before", "after")
        return (
            Section("facts that differ", ("fact", *columns), tuple(_row(p) for p in self.facts)),
            Section("figures", ("figure", *columns, "change"), tuple(f.row() for f in self.figures), (1, 2, 3)),
            Section(
                f"inputs sharded differently ({len(self.inputs)} of {self.num_inputs})",
                ("argument", *columns),
                tuple(_row(p) for p in self.inputs),
            ),
        )


def _row(pair: Pair) -> tuple[str, str, str]:
    return pair.name, pair.before or "-", pair.after or "-"


def diff(before: Plan, after: Plan) -> PlanDiff:
    """The changes from one plan to another; of any programs and clusters."""
    a, b = before.content, after.content
    lay_a, lay_b = _inputs(a), _inputs(b)
    paths = list(dict.fromkeys([*lay_a, *lay_b]))
    return PlanDiff(
        identical=a == b,
        facts=_pairs(_facts(a), _facts(b)),
        figures=(
            Figure("step time", a.step_time, b.step_time, "s"),
            Figure("peak memory", a.peak_memory, b.peak_memory, "bytes"),
            *_figures(_memory(a), _memory(b), "bytes"),
            *_figures(_communication(a), _communication(b), "s"),
        ),
        inputs=_pairs(lay_a, lay_b),
        num_inputs=len(paths),
    )


def _pairs(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Pair, ...]:
    names = list(dict.fromkeys([*a, *b]))
    return tuple(Pair(n, a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n))


def _figures(a: Mapping[str, float], b: Mapping[str, float], unit: str) -> tuple[Figure, ...]:
    figures = (Figure(n, a.get(n, 0.0), b.get(n, 0.0), unit) for n in dict.fromkeys([*a, *b]))
    return tuple(f for f in figures if f.before or f.after)


def _facts(c: PlanContent) -> dict[str, str]:
    return {
        "program": c.program,
        "fingerprint": c.fingerprint[:12],
        "cluster": f"{c.cluster_name} ({counted(sum(len(s.devices) for s in c.stages), 'device')})",
        "meshes": "; ".join(" x ".join(f"{n}@{axis}" for axis, n in s.mesh_axes) for s in c.stages),
        "pipeline": pipeline_text(c),
        "strategy": c.search.strategy,
        "donated": f"{len(c.donated)} inputs",
    }


def _memory(c: PlanContent) -> dict[str, float]:
    fullest = max((s.memory for s in c.stages), key=lambda m: m.total, default=None)
    return {f"memory: {kind}": float(getattr(fullest, kind, 0)) for kind in MEMORY_KINDS}


def _communication(c: PlanContent) -> dict[str, float]:
    seconds: dict[str, float] = {"total communication": 0.0}
    for record in sorted((r for s in c.stages for r in s.collectives), key=lambda r: r.kind):
        name = f"total communication: {record.kind}"
        seconds["total communication"] += record.seconds
        seconds[name] = seconds.get(name, 0.0) + record.seconds
    return seconds


def _inputs(c: PlanContent) -> dict[str, str]:
    """Layout of each argument leaf, by path: ``f32[8@x=4,64]``, with the stages where there are several."""
    shown = {}
    for i in c.inputs:
        stages: dict[str, list[int]] = {}
        for r in i.of_stages:
            text = with_sizes(r.type, r.layout, c.stages[r.stage].mesh_shape) + ", in host memory" * (
                r.memory == "host"
            )
            stages.setdefault(text, []).append(r.stage)
        several = len(c.stages) > 1
        shown[i.path] = "; ".join(f"{t} on {stages_text(s)}" if several else t for t, s in stages.items())
    return shown


def with_sizes(type_text: str, layout_text: str, sizes: Mapping[str, int]) -> str:
    """``f32[8@x=4,64]`` from ``f32[8,64]``, ``[x,.]`` and the size of x: layouts of other meshes compare right."""
    layout = Layout.parse(layout_text)
    dtype, bracket, inner = type_text.partition("[")
    numbers = inner.rstrip("]").split(",") if layout.dims else []
    dims = [
        n + ("@" + "+".join(f"{a}={sizes.get(a, '?')}" for a in axes) if axes else "")
        for n, axes in zip(numbers, layout.dims, strict=True)
    ]
    tail = f"+{layout.reduce}({','.join(layout.partial)})" if layout.partial else ""
    return f"{dtype}{bracket}{','.join(dims)}{']' if bracket else ''}{tail}"
