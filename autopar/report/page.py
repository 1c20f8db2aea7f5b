"""A plan as one HTML page that needs nothing else: own style, SVG bars, no network.

A script of the page itself searches and folds its tables; without scripts all of them are there to read.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.errors.names import counted
from autopar.plan import Plan, PlanContent, Stage
from autopar.plan.text import TIME_PARTS, USELESS, bytes_text, seconds_text, time_parts
from autopar.report.diff import diff
from autopar.report.layers import layers, links, why
from autopar.report.pictures import cluster_svg, memory_svg, time_svg, timeline_svg
from autopar.report.sections import MEMORY_KINDS, Section, considered, head, sections, trail
from autopar.simulate import simulate

#: Rows of a table at most: a page of a program with thousands of inputs stays under 1 MB.
MAX_ROWS = 1000

#: Most expensive choices on the page.
MAX_CHOICES = 50

#: Boxes and workers of a timeline with labels at most.
MAX_EVENTS, MAX_LABELLED = 2000, 16

#: Characters of a cell at most; what is longer ends in dots, and is whole in the text that a pointer shows.
MAX_CELL = 200

_BREAKS = re.compile(r"([\])/.])(?=[^\s\])/.<])")


def plan_page(plan: Plan, folders: Sequence[Path] = ()) -> str:
    """The page: head figures, why, pictures, bars, sharding of each layer, communication, options, notes, choices.

    Plans with several stages have pictures of the timeline, of the stages on the cluster, and of the memory and time of
    all stages; those with one stage have bars. The same plan gives the same page, but for the seconds of
    planning where the plan still has them.

    Args:
        plan: what is shown.
        folders: where the user's files may be, for the text of their lines; files of this process are found anyway.
    """
    plan = plan.shown
    c = plan.content
    several = len(c.stages) > 1
    return _template("plan.html.j2").render(
        title=f"{c.program} on {c.cluster_name}",
        figures=figures(plan),
        head=head(plan),
        why=why(c),
        bars=() if several else (*memory_bars(c), *time_bars(c)),
        sections=(
            layers(c, MAX_ROWS),
            links(c),
            *with_source_lines(sections(plan, rows=MAX_ROWS, choices=MAX_CHOICES), folders),
            *([trail(plan, MAX_ROWS)] if plan.search.trail else []),
        ),
        notes=c.notes[:MAX_ROWS],
        pictures=pictures(plan),
    )


def pair_page(before: Plan, after: Plan, names: tuple[str, str] = ("before", "after")) -> str:
    """Two plans side by side: their figures, pictures, what differs, and the sharding and communication of both.

    Args:
        before: on the left.
        after: on the right.
        names: what they are called.
    """
    differences = diff(before, after)
    sides = [
        {
            "name": name,
            "figures": figures(plan),
            "why": why(plan.content),
            "pictures": pictures(plan)
            or (("Memory by kind", memory_svg(plan.content, device_memory_bytes(plan.content))),),
            "sections": (
                layers(plan.content, MAX_ROWS // 4),
                links(plan.content),
                considered(plan.content, MAX_ROWS // 4),
            ),
        }
        for name, plan in zip(names, (before, after), strict=True)
    ]
    shown = tuple(
        replace(s, rows=s.rows[: MAX_ROWS // 2], left_out=max(0, len(s.rows) - MAX_ROWS // 2))
        for s in differences.sections()
    )
    return _template("pair.html.j2").render(
        title=f"{before.content.program}: {names[0]} and {names[1]}",
        identical=differences.identical,
        sides=sides,
        sections=shown,
    )


def tables_page(title: str, shown: Sequence[Section]) -> str:
    """A page of tables alone, each of which a click on a column's name sorts.

    Args:
        title: of the page.
        shown: the tables.
    """
    return _template("tables.html.j2").render(title=title, sections=tuple(shown))


def pictures(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(title, SVG) of a plan with several stages; none of others, but for a timeline where there is a pipeline."""
    c = plan.content
    drawn = []
    if plan.pipeline is not None:
        drawn.append(("Timeline", timeline_picture(plan)))
    if len(c.stages) > 1:
        drawn.append(("Stages on the cluster", cluster_svg(c)))
        drawn.append(("Memory by kind", memory_svg(c, device_memory_bytes(c))))
        drawn.append(("Busy time of a step", time_svg(c)))
    return tuple((title, svg) for title, svg in drawn if svg)


def timeline_picture(plan: Plan) -> str:
    """The simulated step as SVG: with labels and memory where there are few events, else as paths."""
    timeline = simulate(plan)
    few = len(timeline.events) <= MAX_EVENTS and timeline.num_workers <= MAX_LABELLED
    if not few:
        return timeline_svg(timeline)
    return timeline.to_svg().replace("<svg ", '<svg class="timeline" ', 1)


def _gap(gap: float | None) -> tuple[str, str]:
    """(figure, explanation) of the share that an optimum may be faster."""
    if gap is None:
        return "no bound", "this search proves none"
    if gap > USELESS:
        return "no useful bound", "on the whole decision"
    return f"{gap:.2%}", "that an optimum may be faster"


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("autopar.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    environment.filters["breakable"] = breakable
    environment.globals["max_cell"] = MAX_CELL
    return environment.get_template(name)


def short(text: str) -> str:
    """``text``, cut to `MAX_CELL` characters."""
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


def breakable(text: str) -> Markup:
    """``text`` as HTML that may go on in the next line after ``]``, ``)``, ``/`` and ``.`` but not inside a word."""
    return Markup(_BREAKS.sub(r"\1<wbr>", str(escape(text))))


def figures(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """(label, value, explanation) of the large figures at the top."""
    c = plan.content
    limit = device_memory_bytes(c)
    devices = sum(len(s.devices) for s in c.stages)
    share = f"{c.peak_memory / limit:.1%} of a device" if limit else "a device"
    gap = plan.search.gap
    pipelined = len(c.stages) > 1 or c.num_microbatches > 1
    shapes = sorted({"x".join(str(n) for _, n in s.mesh_axes) for s in c.stages})
    return (
        ("step time", seconds_text(c.step_time), "predicted"),
        ("peak memory", bytes_text(c.peak_memory), share),
        ("devices", str(devices), f"mesh {', '.join(shapes)}"),
        (
            "stages",
            str(len(c.stages)),
            f"{counted(c.num_microbatches, 'microbatch')}, schedule {c.schedule}" if pipelined else "no pipeline",
        ),
        ("gap to the bound", *_gap(gap)),
    )


@dataclass(frozen=True)
class BarPart:
    """A piece of a bar.

    Args:
        label: what it stands for.
        value: its amount, as text.
        start: where it begins, percent of the width.
        width: percent of the width.
        color: number of its color.
    """

    label: str
    value: str
    start: float
    width: float
    color: int


@dataclass(frozen=True)
class Bar:
    """A bar of parts, and where its limit is.

    Args:
        title: what is shown.
        parts: from left to right.
        limit: percent of the width, or None.
        caption: the sentence below.
    """

    title: str
    parts: tuple[BarPart, ...]
    limit: float | None
    caption: str


def _parts(amounts: list[tuple[str, str, float]], whole: float) -> tuple[BarPart, ...]:
    parts, start = [], 0.0
    for color, (label, value, amount) in enumerate(amounts):
        width = 100 * amount / whole if whole > 0 else 0.0
        if width > 0:
            parts.append(BarPart(label, value, round(start, 3), round(width, 3), color))
        start += width
    return tuple(parts)


def device_memory_bytes(c: PlanContent) -> int | None:
    """Bytes of the smallest device of the plan's cluster; None where the plan does not hold a cluster."""
    try:
        return Cluster.from_json(c.cluster).memory_bytes
    except AutoparError:
        return None


def memory_bars(c: PlanContent) -> tuple[Bar, ...]:
    """Memory of each stage by kind, and its share of a device's memory."""
    limit = device_memory_bytes(c)
    bars = []
    for i, stage in enumerate(c.stages):
        total = stage.memory.total
        amounts = [
            (kind.replace("_", " "), bytes_text(count), float(count))
            for kind, count in ((k, getattr(stage.memory, k)) for k in MEMORY_KINDS)
        ]
        name = f"stage {i}: " if len(c.stages) > 1 else ""
        bars.append(Bar(f"{name}memory by kind", _parts(amounts, total), None, f"{bytes_text(total)} a device"))
        if limit is not None:
            scale = max(total, limit)
            bars.append(
                Bar(
                    f"{name}of the memory of a device",
                    _parts(amounts, scale),
                    round(100 * limit / scale, 3),
                    f"{total / limit:.1%} of {bytes_text(limit)}",
                )
            )
    return tuple(bars)


def time_bars(c: PlanContent) -> tuple[Bar, ...]:
    """Seconds of each stage: computing, waiting for messages, and waiting for its host."""
    return tuple(_time_bar(f"stage {i}: " if len(c.stages) > 1 else "", s) for i, s in enumerate(c.stages))


def _time_bar(name: str, stage: Stage) -> Bar:
    parts = time_parts(stage)
    amounts = [(label, seconds_text(seconds), seconds) for label, seconds in zip(TIME_PARTS, parts, strict=True)]
    share = parts[0] / stage.step_time if stage.step_time > 0 else 1.0
    return Bar(
        f"{name}time of a step", _parts(amounts, stage.step_time), None,
        f"{seconds_text(stage.step_time)}, of which {share:.1%} computing",
    )  # fmt: skip


#: Title of the listing.
LISTING = "source lines"

_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+)\b")


def with_source_lines(sections: Sequence[Section], folders: Sequence[Path] = ()) -> tuple[Section, ...]:
    """Sections whose rows are linked to the lines that they come from, with a listing of these lines after them.

    What a row's operator computes, with its shapes, is shown where a pointer is over the row's name. A line's text is
    there where its file is one of this process, or in one of ``folders``.

    Args:
        sections: of a page.
        folders: where files may be that this process did not load.
    """
    lines: dict[str, list[str]] = {}
    linked = []
    for s in sections:
        if "line" not in s.header:
            linked.append(s)
            continue
        at = s.header.index("line")
        for row in s.rows:
            if row[at]:
                lines.setdefault(row[at], []).append(row[0])
        anchors = {line: f"line-{n}" for n, line in enumerate(lines)}
        targets = tuple(anchors.get(row[at], "") for row in s.rows)
        form = s.header.index("computes")
        hover = tuple(row[form] for row in s.rows)
        linked.append(replace(s, link_column=at, targets=targets, hover=hover))
    if not lines:
        return tuple(linked)
    rows = tuple((line, text_of(line, folders), ", ".join(names)) for line, names in lines.items())
    ids = tuple(f"line-{n}" for n in range(len(rows)))
    return (*linked, Section(LISTING, ("line", "text", "choices"), rows, ids=ids))


def text_of(place: str, folders: Sequence[Path] = ()) -> str:
    """The text of a line given as ``file.py:12:8 (function)``; "" where its file is not found, or several are.

    Plans name files without their folders; a module of this process says where one lies, or else it is in ``folders``.
    """
    place_match = _PLACE.match(place.rpartition(", from ")[2])
    if not place_match:
        return ""
    files = {getattr(m, "__file__", None) or "" for m in tuple(sys.modules.values())}
    here = [file for file in files if os.path.basename(file) == place_match["file"]]
    if not here:
        here = sorted({str(f.resolve()) for folder in folders if (f := folder / place_match["file"]).is_file()})
    return linecache.getline(here[0], int(place_match["line"])).strip() if len(here) == 1 else ""
