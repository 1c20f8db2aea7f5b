"""Pictures of plans with several stages, as SVG of a few paths: legible and small with hundreds of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.errors.names import counted
from autopar.plan import PlanContent
from autopar.plan.text import TIME_PARTS, bytes_text, seconds_text, time_parts
from autopar.report.sections import MEMORY_KINDS
from autopar.simulate import Timeline

_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "before": "c5",
        "forward": "c0",
        "meeting": "c5",
        "backward": "c2",
        "weight": "c1",
        "update": "c4",
        "send": "c3",
    }
)
_LEFT, _WIDTH = 78.0, 1000.0
_RIGHT = 80.0

#: Most cells of the picture of a cluster; larger clusters are drawn a node a cell.
MAX_CELLS = 4096


def timeline_svg(timeline: Timeline) -> str:
    """A timeline: a row for each worker, a path for each kind of work; idle time is left blank.

    Works are not labelled. Neighbouring works of a kind less than a third of a pixel apart are drawn as one.
    """
    workers = timeline.num_workers
    row = max(7.0, min(22.0, 900.0 / max(1, workers)))
    top, step = 24.0, float(timeline.step_time)
    scale = _WIDTH / step if step else 0.0
    kinds = [k for k in _COLORS if any(e.kind == k and e.end_s > e.start_s for e in timeline.events) and k != "send"]
    parts = [_open(_LEFT + _WIDTH + _RIGHT, top + workers * row + 22, timeline.summary())]
    parts += _legend([(k, _COLORS[k]) for k in kinds])
    parts.append(f'<rect class="bg" x="{_LEFT:g}" y="{top:g}" width="{_WIDTH:g}" height="{workers * row:.1f}"/>')
    for kind in kinds:
        path = []
        for worker in range(workers):
            y = top + worker * row
            runs = [
                (float(e.start_s - timeline.start_s) * scale, float(e.end_s - timeline.start_s) * scale)
                for e in timeline.computing(worker)
                if e.kind == kind and e.end_s > e.start_s
            ]
            path.append(_strokes(_joined(runs), y + row / 2))
        parts.append(
            f'<path class="{_COLORS[kind].replace("c", "s")}" stroke-width="{row - 2:.1f}" d="{"".join(path)}"/>'
        )
    every = max(1, math.ceil(11.0 / row))
    for worker in range(0, workers, every):
        y = top + worker * row + row / 2 + 4
        parts.append(f'<text x="{_LEFT - 6:g}" y="{y:.1f}" text-anchor="end">worker {worker}</text>')
        busy = float(timeline.busy_s(worker)) / step if step else 0.0
        parts.append(f'<text x="{_LEFT + _WIDTH + 6:g}" y="{y:.1f}">{busy:.0%} busy</text>')
    for i in range(5):
        x = _LEFT + _WIDTH * i / 4
        anchor = "end" if i == 4 else "start" if i == 0 else "middle"
        y = top + workers * row + 15
        parts.append(f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{seconds_text(step * i / 4)}</text>')
    return "\n".join([*parts, "</svg>"])


def _joined(runs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals, those joined that nearly touch and are too narrow to be told apart."""
    joined: list[tuple[float, float]] = []
    for start, end in runs:
        if joined and start - joined[-1][1] < 0.3 and end - start < 3:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _strokes(runs: Sequence[tuple[float, float]], y: float) -> str:
    """Horizontal strokes in tenths of a pixel, each given from where the last one ended: a few characters each."""
    strokes: list[str] = []
    at = 0
    for start, end in runs:
        left, right = round((_LEFT + start) * 10), round((_LEFT + end) * 10)
        move = f"m{(left - at) / 10:g} 0" if strokes else f"M{left / 10:g} {y:.1f}"
        strokes.append(f"{move}h{max(1, right - left) / 10:g}")
        at = left + max(1, right - left)
    return "".join(strokes)


def cluster_svg(c: PlanContent) -> str:
    """The devices of the cluster, node by node, each with the number of its stage; "" without the cluster's data."""
    try:
        cluster = Cluster.from_json(c.cluster)
    except AutoparError:
        return ""
    stages_of: dict[int, list[int]] = {}
    for i, stage in enumerate(c.stages):
        for d in stage.devices:
            stages_of.setdefault(d, []).append(i)
    nodes: list[list[int]] = []
    first = 0
    for g in cluster.groups:
        per = g.size if g.inter == "intra" else g.devices_per_node
        nodes += [list(range(first + n, first + n + per)) for n in range(0, g.size, per)]
        first += g.size
    if cluster.num_devices > MAX_CELLS:
        nodes = [node[:1] for node in nodes][:MAX_CELLS]
    per = max(len(n) for n in nodes)
    columns = min(per, 16)
    cell_w, cell_h = 30.0, 17.0
    node_w = columns * cell_w + 10
    lines = math.ceil(per / columns)
    node_h = lines * cell_h + 22
    across = max(1, min(len(nodes), int((_LEFT + _WIDTH + _RIGHT) // (node_w + 8))))
    height = math.ceil(len(nodes) / across) * (node_h + 6)
    title = f"{counted(len(c.stages), 'stage')} on {counted(cluster.num_devices, 'device')}"
    parts = [_open(across * (node_w + 8), height, title)]
    for n, node in enumerate(nodes):
        x, y = (n % across) * (node_w + 8), (n // across) * (node_h + 6)
        parts.append(f'<rect class="bg" x="{x:g}" y="{y:g}" width="{node_w:g}" height="{node_h:g}" rx="4"/>')
        parts.append(f'<text x="{x + 5:g}" y="{y + 13:g}">node {n}</text>')
        for k, device in enumerate(node):
            left, top = x + 5 + (k % columns) * cell_w, y + 18 + (k // columns) * cell_h
            held = stages_of.get(device, [])
            color = f"c{held[0] % 6}" if held else "none"
            label = "/".join(map(str, held)) or "-"
            said = f"device {device}: stage {label}" if held else f"device {device}: no stage"
            parts.append(
                f'<g><title>{said}</title><rect class="{color}" x="{left:g}" y="{top:g}" '
                f'width="{cell_w - 2:g}" height="{cell_h - 2:g}"/>'
                f'<text class="on" x="{left + cell_w / 2 - 1:g}" y="{top + 12:g}" text-anchor="middle">{label}</text>'
                "</g>"
            )
    return "\n".join([*parts, "</svg>"])


def memory_svg(c: PlanContent, limit: int | None) -> str:
    """Bytes a device by kind, a row a stage, against the memory of a device."""
    amounts = [[(k.replace("_", " "), float(getattr(s.memory, k))) for k in MEMORY_KINDS] for s in c.stages]
    return _rows_svg(amounts, float(limit or 0), bytes_text, "memory of a device")


def time_svg(c: PlanContent) -> str:
    """Busy seconds a step by kind, a row a stage, against the step."""
    amounts = [list(zip(TIME_PARTS, time_parts(s), strict=True)) for s in c.stages]
    return _rows_svg(amounts, c.step_time, seconds_text, "step time")


def _rows_svg(
    amounts: Sequence[Sequence[tuple[str, float]]], limit: float, show: Callable[[float], str], what: str
) -> str:
    """Stacked bars, a row each, on one scale with a line at ``limit``."""
    scale_to = max([limit, *(sum(a for _, a in row) for row in amounts)]) or 1.0
    row = max(10.0, min(22.0, 900.0 / max(1, len(amounts))))
    top = 24.0
    names = [k for k, _ in amounts[0]] if amounts else []
    used = [(k, f"c{i}") for i, k in enumerate(names) if any(r[i][1] for r in amounts)]
    parts = [_open(_LEFT + _WIDTH + _RIGHT, top + len(amounts) * row + 20, what), *_legend(used)]
    height = len(amounts) * row
    parts.append(f'<rect class="bg" x="{_LEFT:g}" y="{top:g}" width="{_WIDTH:g}" height="{height:.1f}"/>')
    every = max(1, math.ceil(11.0 / row))
    for i, kinds in enumerate(amounts):
        x, y = _LEFT, top + i * row
        total = sum(a for _, a in kinds)
        said = f"stage {i}: " + ", ".join(f"{k} {show(a)}" for k, a in kinds if a)
        parts.append(f"<g><title>{escape(said)}</title>")
        for n, (_, amount) in enumerate(kinds):
            width = amount / scale_to * _WIDTH
            if width > 0.05:
                parts.append(
                    f'<rect class="c{n}" x="{x:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{row - 2:.1f}"/>'
                )
            x += width
        parts.append("</g>")
        if i % every == 0:
            y += row / 2 + 4
            parts.append(f'<text x="{_LEFT - 6:g}" y="{y:.1f}" text-anchor="end">stage {i}</text>')
            parts.append(f'<text x="{_LEFT + _WIDTH + 6:g}" y="{y:.1f}">{show(total)}</text>')
    if limit:
        x = _LEFT + limit / scale_to * _WIDTH
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3:g}" y2="{top + height + 3:.1f}"/>')
        label = f"{what}: {show(limit)}"
        parts.append(f'<text x="{x:.1f}" y="{top + height + 15:.1f}" text-anchor="end">{label}</text>')
    return "\n".join([*parts, "</svg>"])


def _open(width: float, height: float, title: str) -> str:
    return (
        f'<svg class="picture" role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:.1f}">'
        f"<title>{escape(title)}</title>"
    )


def _legend(kinds: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], _LEFT
    for name, color in kinds:
        parts.append(f'<rect class="{color}" x="{x:g}" y="4" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16:g}" y="14">{escape(name)}</text>')
        x += 40 + 7.0 * len(name)
    return parts
