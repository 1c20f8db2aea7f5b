"""Timelines as SVG: computing, sending and memory of every worker, in one standalone document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

from autopar.plan.text import bytes_text, seconds_text
from autopar.schedule import NONE
from autopar.simulate.event import Event, Memory, shown_range

_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#4c78a8", "backward": "#59a14f", "weight": "#edc948", "before": "#9c755f", "update": "#b07aa1",
        "send": "#bab0ac", "meeting": "#e15759",
    }
)  # fmt: skip
_LEFT, _TOP, _WIDTH = 90.0, 46.0, 1000.0
_COMPUTE, _SEND, _MEMORY, _GAP = 24.0, 6.0, 22.0, 10.0
_DARK = frozenset({"forward", "backward", "before", "meeting", "update"})


def svg_picture(num_workers: int, events: Sequence[Event], memory: Sequence[Memory], title: str) -> str:
    """The picture. Every box tells its work and times when the mouse is on it.

    Args:
        num_workers: workers, busy or not.
        events: what took time.
        memory: bytes over time of each worker, or nothing.
        title: the line above.
    """
    start, end = shown_range(events)
    scale = _WIDTH / float(end - start) if end > start else 0.0
    row = _COMPUTE + _SEND + (_MEMORY if memory else 0.0) + _GAP
    height = _TOP + num_workers * row + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20:g} {height:g}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="10" y="18" fill="#222222">{escape(title)}</text>',
        *_legend(events),
    ]
    peak = max((size for line in memory for _, size in line), default=0)
    for worker in range(num_workers):
        top = _TOP + worker * row
        parts.append(f'<text x="10" y="{top + 16:g}" fill="#222222">worker {worker}</text>')
        parts.append(_rect(_LEFT, top, _WIDTH, _COMPUTE, "#f2f2f2"))
        for e in events:
            if e.worker == worker and e.end_s > e.start_s:
                parts.append(
                    _event(e, _LEFT + float(e.start_s - start) * scale, top, float(e.end_s - e.start_s) * scale)
                )
        if worker < len(memory):
            base = top + _COMPUTE + _SEND + _MEMORY
            parts.append(_curve(memory[worker], float(start), float(end), scale, base, peak))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(events: Sequence[Event]) -> list[str]:
    kinds = [k for k in _COLORS if any(e.kind == k for e in events)]
    parts = []
    for i, kind in enumerate(kinds):
        x = _LEFT + 110 * i
        parts.append(_rect(x, 27, 10, 10, _COLORS[kind]))
        parts.append(f'<text x="{x + 15:g}" y="36" fill="#222222">{kind}</text>')
    return parts


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}"/>'


def _event(e: Event, x: float, top: float, width: float) -> str:
    took = f"{seconds_text(float(e.start_s))} to {seconds_text(float(e.end_s))}"
    y, height = (top, _COMPUTE) if e.computes else (top + _COMPUTE, _SEND - 1)
    to = f" to worker {e.target}" if e.target != NONE else ""
    box = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_COLORS[e.kind]}" '
        f'stroke="#ffffff" stroke-width="0.5"><title>{escape(e.name)}{to}: {took}</title></rect>'
    )
    label = "" if e.microbatch == NONE else str(e.microbatch)
    if not e.computes or not label or width < 7 * len(label) + 2:
        return box
    color = "#ffffff" if e.kind in _DARK else "#222222"
    return (
        box + f'<text x="{x + width / 2:.2f}" y="{y + 16:.2f}" text-anchor="middle" fill="{color}" '
        f'pointer-events="none">{label}</text>'
    )


def _curve(line: Memory, start: float, end: float, scale: float, base: float, peak: int) -> str:
    """Bytes over time as steps, with the worker's own peak next to them."""
    height = _MEMORY - 4
    points = []
    level = base
    for time_s, size in line:
        x = _LEFT + (min(max(float(time_s), start), end) - start) * scale
        points.append(f"{x:.2f},{level:.2f}")
        level = base - (size / peak * height if peak else 0.0)
        points.append(f"{x:.2f},{level:.2f}")
    points.append(f"{_LEFT + (end - start) * scale:.2f},{level:.2f}")
    most = max((size for _, size in line), default=0)
    return (
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#e15759" stroke-width="1"/>'
        f'<text x="10" y="{base - 4:.2f}" font-size="10" fill="#e15759">{bytes_text(most)}</text>'
    )
