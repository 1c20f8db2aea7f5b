"""Timelines in characters: a line a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.schedule import NONE
from autopar.simulate.event import Event, shown_range

#: How digits and the rest of a box look by kind; also in one column a forward is not like a backward.
_PLAIN = "0123456789"
_DIGITS: Mapping[str, str] = MappingProxyType({"forward": _PLAIN, "backward": "₀₁₂₃₄₅₆₇₈₉", "weight": "⁰¹²³⁴⁵⁶⁷⁸⁹"})
_FILL: Mapping[str, str] = MappingProxyType(
    {"forward": "─", "backward": "━", "weight": "┄", "before": "░", "meeting": "▓", "update": "▒"}
)
_IDLE = "·"
#: Characters for the shortest pass, if there is room.
_WIDE = 3


def text_picture(num_workers: int, events: Sequence[Event], columns: int) -> str:
    """One line a worker: microbatch digits, a line as long as the pass takes, dots where it waits; then the legend.

    Args:
        num_workers: workers, busy or not.
        events: what took time; transfers are not shown.
        columns: the most characters for the time.
    """
    computing = [e for e in events if e.computes and e.end_s > e.start_s]
    start, end = shown_range(events)
    width = _width(computing, float(end - start), max(1, columns))
    lines = [[_IDLE] * width for _ in range(num_workers)]
    for e in computing:
        first = round(float(e.start_s - start) / float(end - start) * width)
        last = max(first + 1, round(float(e.end_s - start) / float(end - start) * width))
        box = _box(e, last - first)
        lines[e.worker][first : first + len(box)] = box
    label = len(str(num_workers - 1))
    text = "".join(f"{w:>{label}} │{''.join(line[:width])}│\n" for w, line in enumerate(lines))
    kinds = {e.kind for e in computing}
    legend = [
        f"{_DIGITS[k][1]}{_FILL[k]} {k}" if k in _DIGITS else f"{fill} {k}" for k, fill in _FILL.items() if k in kinds
    ]
    return text + "  ".join([*legend, f"{_IDLE} waits"]) + "\n"


def _width(computing: Sequence[Event], length: float, columns: int) -> int:
    shortest = min((float(e.end_s - e.start_s) for e in computing), default=length)
    if shortest <= 0:
        return columns
    units = length / shortest
    wide = min(_WIDE, int(columns / units))
    return round(units * wide) if wide else columns


def _box(e: Event, width: int) -> list[str]:
    fill = _FILL[e.kind]
    if e.microbatch == NONE or e.kind not in _DIGITS:
        return [fill] * width
    number = str(e.microbatch)
    # Without room for the whole number its end tells more: neighbours differ there.
    digits = [_DIGITS[e.kind][int(c)] for c in number][-width:]
    return digits + [fill] * (width - len(digits))
