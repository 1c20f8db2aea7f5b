"""How long planning takes as models get deeper and clusters larger; `docs/growth.svg` is drawn from it.

Blocks of GPT 39B's width in eight stages: 8 to 128 of them in one loop on 64 devices, and 32 of them on 16 to 1,024
devices (8 are too few for their state). CPU seconds of both processes that plan, so that a busy machine matters less.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.large import SCANNED, Case, measure, stages
from benchmarks.plot import line_plot
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import gpt

#: Part by which the CPU seconds of the deepest model may exceed those of the one with `FROM` layers.
FLAT, FROM = 0.25, 32
PICTURE = Path(__file__).parents[1] / "docs" / "growth.svg"


def case(layers: int, nodes: int, preset: str = "39B", **overrides: int) -> Case:
    """Blocks of one width in eight stages on so many nodes of eight devices."""
    count = overrides.pop("stages", 8)
    sizes = {"batch": 1024, **SCANNED, **overrides, "layers": layers}
    name = f"{layers} layers, {8 * nodes} devices"
    return Case(name, gpt.build, preset, "dgx-a100", nodes, None, sizes, stages(count, sizes["batch"] // 4))


#: Cases by the line that they are on, each with its place on the x axis.
LINES: Mapping[str, tuple[tuple[int, Case], ...]] = MappingProxyType(
    {
        "layers, on 64 devices": tuple((n, case(n, 8)) for n in (8, 16, 32, 64, 128)),
        "devices, 32 layers": tuple((8 * n, case(32, n)) for n in (2, 4, 8, 16, 32, 64, 128)),
    }
)
QUICK: Mapping[str, tuple[tuple[int, Case], ...]] = MappingProxyType(
    {"layers": tuple((n, case(n, 1, "tiny", batch=8, stages=2)) for n in (2, 4))}
)


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes tiny models, and draws nothing."""
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for line, cases in (QUICK if quick else LINES).items():
        for place, one in cases:
            say(f"growth: {one.name}")
            row = in_new_process(measure, one)
            rows.append({"line": line, **row})
            lines.setdefault(line, []).append((float(place), float(row["cpu_s"])))
    if not quick:
        title = "Planning blocks of GPT 39B's width in eight stages"
        PICTURE.write_text(line_plot(title, "layers, or devices", "CPU seconds of planning", lines), encoding="utf-8")
    deep = dict(next(iter(lines.values())))
    most = deep[max(deep)] / deep.get(float(FROM), deep[min(deep)]) - 1
    met = all("error" not in row for row in rows) and (quick or most <= FLAT)
    return Report(
        "growth",
        f"the deepest model takes at most {FLAT:.0%} more than {FROM} layers",
        tuple(rows),
        met,
        (f"the deepest takes {most:+.0%}",),
        measured=("wall_s", "cpu_s"),
    )
