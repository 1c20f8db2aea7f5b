"""Plans as graphs in the DOT language of Graphviz."""

from __future__ import annotations

import json

from autopar.plan import Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.report.layers import layers

#: Arguments named in a stage at most.
MAX_NAMED = 12


def plan_dot(plan: Plan) -> str:
    """Stages as boxes with their devices, mesh, memory and time, and what they send each other.

    With one stage the box has the sharding of the arguments.
    """
    c = plan.content
    lines = ["digraph plan {", "  rankdir=LR;", '  node [shape=box, fontname="sans-serif"];']
    lines.append(f"  label={json.dumps(f'{c.program} on {c.cluster_name}: {seconds_text(c.step_time)}')};")
    for i, s in enumerate(c.stages):
        mesh = " x ".join(f"{n}@{a}" for a, n in s.mesh_axes)
        devices = (
            f"{s.devices[0]}-{s.devices[-1]}" if len(s.devices) > 1 else str(s.devices[0]) if s.devices else "none"
        )
        text = [f"stage {i}", f"devices {devices}, mesh {mesh}", f"{bytes_text(s.memory.total)} a device",
                f"{seconds_text(s.step_time)} a step"]  # fmt: skip
        if len(c.stages) == 1:
            rows = layers(c, MAX_NAMED)
            text += [f"{path}: {sharding}" for path, _, _, _, sharding in rows.rows]
            text += [f"and {rows.left_out} more"] if rows.left_out else []
        lines.append(f"  stage{i} [label={json.dumps(chr(10).join(text))}];")
    lines += [f"  stage{a} -> stage{b} [label={json.dumps(text)}];" for (a, b), text in sorted(_sends(plan).items())]
    return "\n".join([*lines, "}"]) + "\n"


def _sends(plan: Plan) -> dict[tuple[int, int], str]:
    """Transfers from stage to stage: the number of values and their bytes a device."""
    if plan.pipeline is None:
        return {}
    sizes = {v.name: v.bytes for v in plan.pipeline.values}
    makers = {name: w.stage for w in plan.pipeline.works for name in w.writes}
    sent: dict[tuple[int, int], set[str]] = {}
    for w in plan.pipeline.works:
        for name in w.reads:
            if name in makers and makers[name] != w.stage:
                sent.setdefault((makers[name], w.stage), set()).add(name)
    return {
        pair: f"{len(names)} value{'s' if len(names) > 1 else ''}, {bytes_text(sum(sizes[n] for n in names))}"
        for pair, names in sent.items()
    }
