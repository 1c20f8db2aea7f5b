"""Bars of the HTML page: lengths for its SVG, in percent of the width."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import PlanContent, Stage
from autopar.plan.text import TIME_PARTS, bytes_text, seconds_text, time_parts
from autopar.report.sections import MEMORY_KINDS


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
    """For each stage: its memory by kind, and its share of a device's memory."""
    limit = device_memory_bytes(c)
    bars = []
    for i, stage in enumerate(c.stages):
        total = stage.memory.total
        amounts = [(k, bytes_text(getattr(stage.memory, k)), float(getattr(stage.memory, k))) for k in MEMORY_KINDS]
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
    """For each stage: how long it computes, and how long it waits for messages and for its host."""
    return tuple(_time_bar(f"stage {i}: " if len(c.stages) > 1 else "", s) for i, s in enumerate(c.stages))


def _time_bar(name: str, stage: Stage) -> Bar:
    parts = time_parts(stage)
    amounts = [(label, seconds_text(seconds), seconds) for label, seconds in zip(TIME_PARTS, parts, strict=True)]
    share = parts[0] / stage.step_time if stage.step_time > 0 else 1.0
    return Bar(
        f"{name}time of a step", _parts(amounts, stage.step_time), None,
        f"{seconds_text(stage.step_time)}, of which {share:.1%} computing",
    )  # fmt: skip
