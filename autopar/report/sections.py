"""Tables of a plan, as text that every output draws in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plan import Plan, PlanContent
from autopar.plan.alternatives import outcome_text
from autopar.plan.columns import columns, table, wrapped
from autopar.plan.counterfactuals import ALTERNATIVE
from autopar.plan.details import NO_DETAILS, Details
from autopar.plan.text import (
    AGAINST,
    ALTERNATIVE_HEADER,
    CHEAPER_ALONE,
    CONSIDERED_HEADER,
    CONSIDERED_NOTE,
    alternative_rows,
    bytes_text,
    communication_note,
    explained_choices,
    input_rows,
    inputs_header,
    layers_text,
    seconds_text,
    summary_rows,
)
from autopar.plan.trail import ranges_of, ranges_text

#: Kinds of memory, in the order in which they are shown.
MEMORY_KINDS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "batch", "in_flight")


@dataclass(frozen=True)
class Section:
    """A titled table.

    Args:
        title: what it is about.
        header: names of its columns.
        rows: a text for each column.
        right: columns whose texts are figures, by index.
        left_out: number of rows that a limit cut off.
        rest: where those are.
        note: a sentence below it, or "".
        hover: by row what is shown where a pointer is over its first column; empty where nothing is.
        link_column: column whose cells are links, where there are ``targets``.
        targets: by row the id of the row on the page that its cell links to; "" for none.
        ids: by row its id on the page; empty where rows have none.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    left_out: int = 0
    note: str = ""
    hover: tuple[str, ...] = ()
    link_column: int = 0
    targets: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    rest: str = "a page shows them: autopar report PLAN.json -o PLAN.html"

    def text(self, width: int | None = None) -> str:
        """The section as aligned plain text; "title: none" without rows.

        Args:
            width: most characters of a line; None for those of the terminal.
        """
        width = columns() if width is None else width
        if not self.rows:
            return f"{self.title}: none"
        below = [f"... {self.left_out} more: {self.rest}"] * (self.left_out > 0) + [self.note] * bool(self.note)
        notes = [f"  {line}" for text in below for line in wrapped(text, width - 2)]
        return "\n".join([self.title, table(self.header, self.rows, width), *notes])


def head(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(label, text) of the figures that come first."""
    return tuple(summary_rows(plan.content, plan.phases))


def sections(plan: Plan, *, rows: int = 40, choices: int = 0) -> tuple[Section, ...]:
    """Every table of a plan, those without rows too.

    Args:
        plan: what is shown.
        rows: rows of a table at most.
        choices: number of most expensive choices to show; 0 leaves their table out.
    """
    c = plan.content
    shown = [memory(c), inputs(c, rows), communication(c, rows), alternatives(c), considered(c, rows)]
    shown = [s for s in shown if s.rows or s.title != AGAINST]
    if choices:
        shown.append(expensive_choices(c, choices, plan.details))
    return tuple(shown)


def _cut(rows: Sequence[tuple[str, ...]], limit: int) -> tuple[tuple[tuple[str, ...], ...], int]:
    return tuple(rows[:limit]), max(0, len(rows) - limit)


def memory(c: PlanContent) -> Section:
    """Bytes a device by kind, a stage each row."""
    rows = tuple(
        (
            f"{i} ({layers_text(s)})" if s.layers else str(i),
            *(bytes_text(getattr(s.memory, kind)) for kind in MEMORY_KINDS),
            bytes_text(s.memory.total),
        )
        for i, s in enumerate(c.stages)
    )
    header = ("stage", *(kind.replace("_", " ") for kind in MEMORY_KINDS), "total")
    return Section("memory a device at the fullest moment", header, rows, tuple(range(1, len(header))))


def inputs(c: PlanContent, limit: int) -> Section:
    """Role and sharding of the arguments, those of repeated layers in one row; ``limit`` rows at most."""
    rows, left_out = _cut(input_rows(c), limit)
    return Section("inputs", inputs_header(c), rows, (), left_out)


def communication(c: PlanContent, limit: int) -> Section:
    """Collectives of a step, the dearest of each stage first."""
    several = len(c.stages) > 1
    records = sorted((r for s in c.stages for r in s.collectives), key=lambda r: (-r.seconds, r.stage, r.kind, r.axis))
    all_rows = []
    for r in records:
        row = (r.kind, bytes_text(r.bytes), r.axis, f"{r.count:g}", seconds_text(r.seconds))
        all_rows.append((*row, str(r.stage)) if several else row)
    rows, left_out = _cut(all_rows, limit)
    header = ("kind", "bytes", "axis", "count", "time", *(("stage",) if several else ()))
    note = f"{communication_note(c)}."
    return Section("communication a step", header, rows, (1, 3, 4, *((5,) if several else ())), left_out, note)


def alternatives(c: PlanContent) -> Section:
    """Plans that people write by hand, in as many microbatches and with as much recomputed as this one."""
    note = "In one stage, with as many microbatches and as much recomputed as this plan."
    return Section(AGAINST, ALTERNATIVE_HEADER, tuple(alternative_rows(c)), (1, 2, 3), 0, note)


def considered(c: PlanContent, limit: int) -> Section:
    """Options that the search looked at, the chosen one too."""
    all_rows = [
        (
            o.name,
            seconds_text(o.step_time),
            "-" if o.peak_memory is None else bytes_text(o.peak_memory),
            o.note,
        )
        for o in c.search.considered
        if not o.note.startswith(ALTERNATIVE)
    ]
    rows, left_out = _cut(all_rows, limit)
    return Section("considered", CONSIDERED_HEADER, rows, (1, 2), left_out, CONSIDERED_NOTE)


def trail(plan: Plan, limit: int) -> Section:
    """Rows on the regions that the search closed; ``limit`` at most."""
    all_rows = [
        (
            row.form,
            ranges_text(row.stages) or "any",
            ranges_text(ranges_of(row.microbatches)) or "any",
            " ".join(part for part in (row.schedule, row.remat, row.how) if part not in ("", "none")),
            outcome_text(row, plan.step_time),
            f"{row.work / 1e6:,.1f}",
        )
        for row in plan.search.trail
    ]
    rows, left_out = _cut(all_rows, limit)
    header = ("form", "stages", "microbatches", "besides", "what became of it", "million work units")
    return Section("alternatives that the search closed", header, rows, (5,), left_out)


def expensive_choices(c: PlanContent, limit: int, details: Details = NO_DETAILS) -> Section:
    """The choices that cost most, each with its line and form where they are known, and the next best."""
    known, several = bool(details.operators), len(c.stages) > 1
    ordered = explained_choices(c, c.choices, details)
    all_rows = [
        (
            k.name,
            k.choice,
            seconds_text(k.cost),
            k.runner_up or "nothing else is possible",
            seconds_text(k.runner_up_cost) if k.runner_up else "-",
            str(len(k.members)),
            *((ranges_text(ranges_of(row.stages)),) if several else ()),
            *((row.detail.source, row.detail.form) if known else ()),
        )
        for row in ordered
        for k in [row.choice]
    ]
    rows, left_out = _cut(all_rows, limit)
    costs = [(row.choice.cost, row.choice.runner_up_cost) for row in ordered[: len(rows)]]
    cheaper = any(other_s is not None and other_s < cost_s for cost_s, other_s in costs)
    header = ("for", "choice", "cost", "runner-up", "its cost", "followers")
    return Section(
        "most expensive choices",
        (*header, *(("stages",) if several else ()), *(("line", "computes") if known else ())),
        rows,
        (2, 4, 5),
        left_out,
        "The cost of a runner-up is with everything else as it is."
        + (f" Some are {CHEAPER_ALONE}." if cheaper else ""),
    )
