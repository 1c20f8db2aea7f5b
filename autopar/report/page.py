"""A plan as one HTML page that needs nothing else: own style, SVG bars, no script, no network."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from autopar.plan import Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.report.bars import device_memory_bytes, memory_bars, time_bars
from autopar.report.sections import head, sections
from autopar.simulate import simulate

#: Rows of a table at most: a page of a program with thousands of inputs stays under 1 MB.
MAX_ROWS = 1000

#: Most expensive choices on the page.
MAX_CHOICES = 50

#: Boxes of a timeline at most.
MAX_EVENTS = 3000

#: Characters of a cell at most; what is longer ends in dots.
MAX_CELL = 200


def plan_page(plan: Plan) -> str:
    """The page: head figures, bars of memory and time, inputs, communication, options, notes, dearest choices.

    The same plan gives the same page, but for the seconds of planning where the plan still has them.
    """
    environment = Environment(
        loader=PackageLoader("autopar.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    c = plan.content
    return environment.get_template("plan.html.j2").render(
        title=f"{c.program} on {c.cluster_name}",
        figures=figures(plan),
        head=head(plan),
        bars=(*memory_bars(c), *time_bars(c)),
        sections=sections(plan, rows=MAX_ROWS, choices=MAX_CHOICES),
        notes=c.notes[:MAX_ROWS],
        timeline=timeline_picture(plan),
    )


def timeline_picture(plan: Plan) -> str:
    """The simulated step as SVG; empty without a pipeline, and where it would make the page too large."""
    if plan.pipeline is None:
        return ""
    timeline = simulate(plan)
    return timeline.to_svg() if len(timeline.events) <= MAX_EVENTS else ""


def short(text: str) -> str:
    """``text``, cut to `MAX_CELL` characters."""
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


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
            f"{c.num_microbatches} microbatches, schedule {c.schedule}" if pipelined else "no pipeline",
        ),
        ("optimality", "no bound" if gap is None else f"{gap:.2%}", "gap to the lower bound"),
    )
