"""Lines in a plane as SVG, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640.0, 360.0, 64.0, 170.0, 24.0, 48.0
_COLOURS = ("#1f5fa8", "#c2571a", "#2c7d4f", "#7a3f9d")
Points = Sequence[tuple[float, float]]


def line_plot(title: str, x: str, y: str, lines: Mapping[str, Points]) -> str:
    """An SVG picture of lines with a mark at each point.

    Args:
        title: above it.
        x, y: what the axes are.
        lines: points (x, y), all above 0, by the name that stands at the end of the line.
    """
    points = [p for line in lines.values() for p in line]
    xs, ys = sorted({p[0] for p in points}), [p[1] for p in points]
    ticks = _ticks(min(ys), max(ys))
    left, right = math.log(xs[0]), math.log(xs[-1] if xs[-1] > xs[0] else 2 * xs[0])
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def at(p: tuple[float, float]) -> tuple[float, float]:
        across = (math.log(p[0]) - left) / (right - left)
        up = (math.log(p[1]) - low) / (high - low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="white"/>',
        f'<text x="{_LEFT:g}" y="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(_WIDTH - _RIGHT + _LEFT) / 2:g}" y="{_HEIGHT - 8:g}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="14" y="{_HEIGHT / 2:g}" text-anchor="middle" transform="rotate(-90 14 {_HEIGHT / 2:g})">'
        f"{escape(y)}</text>",
    ]
    for tick in ticks:
        _, level = at((xs[0], tick))
        parts.append(
            f'<line x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6:g}" y="{level + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts += [
        f'<text x="{at((value, ticks[0]))[0]:.1f}" y="{_HEIGHT - _BOTTOM + 16:g}" text-anchor="middle">{value:g}</text>'
        for value in xs
    ]
    for n, (name, line) in enumerate(lines.items()):
        colour, places = _COLOURS[n % len(_COLOURS)], [at(p) for p in line]
        corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        a, b = places[-1]
        parts.append(f'<text x="{a + 8:.1f}" y="{b + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, the first at most ``least`` and the last at least ``most``."""
    first = math.floor(math.log10(least))
    every = [m * 10.0**k for k in range(first, math.ceil(math.log10(most)) + 2) for m in (1, 2, 5)]
    begin = max(n for n, t in enumerate(every) if t <= least * (1 + 1e-9))
    end = min(n for n, t in enumerate(every) if t >= most and n > begin)
    return every[begin : end + 1]
