"""Layouts layer by layer and communication link by link, for plans with many layers, devices and stages."""

from __future__ import annotations

import re
from collections import Counter

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import PlanContent, Stage
from autopar.plan.counterfactuals import ALTERNATIVE
from autopar.plan.text import bound_text, bytes_text, seconds_text
from autopar.plan.trail import ranges_of, ranges_text
from autopar.report.diff import with_sizes
from autopar.report.sections import Section

_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=['_\].])|(?<=_)\d+$")


def layers(c: PlanContent, limit: int) -> Section:
    """The sharding of the arguments, those of all layers that have one layout in one row.

    The number in a path (``state[0]['layers'][3]['w']``, ``block_3``) that takes most values where the rest of the path
    stays is that of a layer: not 0, which is the place in a tuple. Of a stack of layers the type is that of the slices
    that each stage holds.

    Args:
        c: the plan.
        limit: rows at most.
    """
    by_layout: dict[tuple[str, str, str], tuple[list[int], set[int]]] = {}
    times = Counter(pattern for i in c.inputs for pattern, _ in _patterns(i.path))
    for i in c.inputs:
        pattern, number = max(_patterns(i.path), key=lambda p: times[p[0]], default=(i.path, 0))
        if times[pattern] < 2:
            pattern = i.path
        for r, part in zip(i.of_stages, i.parts or (None,), strict=True):
            text = with_sizes(r.type, r.layout, c.stages[r.stage].mesh_shape)
            numbers, stages = by_layout.setdefault((pattern, i.role, text), ([], set()))
            if pattern != i.path:
                numbers.append(number)
            elif part is not None and part.slices is not None:
                numbers += range(*part.slices)
            stages.add(r.stage)
    rows = [
        (pattern, role, ranges_text(ranges_of(numbers)) or "-", ranges_text(ranges_of(stages)), sharding)
        for (pattern, role, sharding), (numbers, stages) in by_layout.items()
    ]
    header = ("argument", "role", "layers", "stages", "sharding")
    return Section("sharding of each layer", header, tuple(rows[:limit]), (), max(0, len(rows) - limit))


def _patterns(path: str) -> list[tuple[str, int]]:
    """A path with ``*`` for one of its numbers, and that number, for each of them."""
    return [(f"{path[: m.start()]}*{path[m.end() :]}", int(m.group())) for m in _INDEX.finditer(path)]


def links(c: PlanContent) -> Section:
    """Communication of all stages, by the links that it goes over."""
    total: dict[tuple[str, str], list[float]] = {}
    for stage in c.stages:
        for r in stage.collectives:
            amounts = total.setdefault((link_of(c, stage, r.axis), r.kind), [0.0, 0.0, 0.0])
            amounts[0] += r.count
            amounts[1] += r.bytes * r.count
            amounts[2] += r.seconds
    whole = sum(a[2] for a in total.values())
    rows = tuple(
        (
            link,
            kind,
            f"{count:g}",
            bytes_text(nbytes),
            seconds_text(seconds),
            f"{seconds / whole:.1%}" if whole else "-",
        )
        for (link, kind), (count, nbytes, seconds) in sorted(total.items(), key=lambda e: -e[1][2])
    )
    header = ("link", "kind", "count", "bytes of tensors", "time", "share")
    note = "Sums over all stages, which work side by side."
    return Section("communication by link", header, rows, (2, 3, 4, 5), 0, note if len(c.stages) > 1 else "")


def link_of(c: PlanContent, stage: Stage, axis: str) -> str:
    """The links that a collective along ``axis`` (axes joined by ``+``) of a stage goes over."""
    if axis == "stages":
        return "between stages"
    try:
        groups = Cluster.from_json(c.cluster).groups
    except AutoparError:
        return "unknown"
    first, group = 0, groups[0]
    for group in groups:
        if stage.devices and stage.devices[0] < first + group.size:
            break
        first += group.size
    names = [name for name, _ in stage.mesh_axes]
    places = [names.index(a) for a in axis.split("+") if a in names]
    if not places:
        return "unknown"
    reach = 1
    for _, size in stage.mesh_axes[min(places) :]:
        reach *= size
    if group.inter == "intra":
        return f"in the slice, {bytes_text(group.intra.bandwidth)}/s"
    if reach <= group.devices_per_node:
        return f"inside a node, {bytes_text(group.intra.bandwidth)}/s"
    return f"between nodes, {bytes_text(group.inter.bandwidth)}/s"


def why(c: PlanContent) -> str:
    """Why this plan and not another, in a sentence or two."""
    options = [o for o in c.search.considered if not o.note.startswith(ALTERNATIVE)]
    others = [o for o in options if o.note != "chosen" and o.step_time is not None]
    failed = sum(o.step_time is None for o in options)
    said = []
    if others:
        second = min(others, key=lambda o: o.step_time or 0.0)
        step_s = next((o.step_time for o in c.search.considered if o.note == "chosen"), None) or c.search.objective
        more = (second.step_time or 0.0) / step_s - 1 if step_s else 0.0
        said.append(
            f"Of {len(others) + 1 + failed} options this is the fastest; the next, {second.name}, is {more:.1%} slower."
        )
    elif options:
        said.append("No other option was planned." if failed else "No other option was compared.")
    if failed:
        said.append(f"{failed} had no plan that fits or {'was' if failed == 1 else 'were'} left out.")
    if c.search.lower_bound is not None:
        text = bound_text(c)
        said.append(f"It is {text}." if text.startswith(("proven", "at most")) else f"There is {text}.")
    return " ".join(said)
