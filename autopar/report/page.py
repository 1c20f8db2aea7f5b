"""A plan as one HTML page that needs nothing else: own style, SVG bars, no network.

A script of the page itself searches and folds its tables; without scripts all of them are there to read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from autopar.plan import Plan
from autopar.plan.text import USELESS, bytes_text, counted, seconds_text
from autopar.report.bars import device_memory_bytes, memory_bars, time_bars
from autopar.report.diff import diff
from autopar.report.layers import layers, links, why
from autopar.report.pictures import cluster_svg, memory_svg, time_svg, timeline_svg
from autopar.report.sections import Section, considered, head, ranges, sections, trail
from autopar.report.source_lines import with_source_lines
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
        head=_head(plan),
        why=why(c),
        bars=() if several else (*memory_bars(c), *time_bars(c)),
        sections=(
            layers(c, MAX_ROWS),
            links(c),
            *with_source_lines(sections(plan, rows=MAX_ROWS, choices=MAX_CHOICES), plan.details, folders),
            *([trail(plan, MAX_ROWS)] if plan.search.trail else []),
        ),
        notes=c.notes[:MAX_ROWS],
        pictures=pictures(plan),
    )


def _head(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The head lines, the meshes of many stages in one."""
    meshes: dict[str, list[int]] = {}
    for i, stage in enumerate(plan.stages):
        meshes.setdefault(" x ".join(f"{n}@{a}" for a, n in stage.mesh_axes), []).append(i)
    text = "; ".join(f"{mesh} on stages {ranges(stages)}" for mesh, stages in meshes.items())
    return tuple((label, text if label == "mesh" and plan.num_stages > 1 else value) for label, value in head(plan))


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
    """(figure, explanation) of the gap to the lower bound."""
    if gap is None:
        return "no bound", "this search proves none"
    return ("no useful bound", "on the whole decision") if gap > USELESS else (f"{gap:.2%}", "gap to the lower bound")


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
    """``text`` as HTML that may go on in the next line behind ``]``, ``)``, ``/`` and ``.`` but not inside a word."""
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
        ("optimality", *_gap(gap)),
    )
