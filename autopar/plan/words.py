"""A plan in the field's words: how many ways of data, tensor, expert and pipeline parallelism, and which ZeRO.

A mesh axis that splits the first dim of the batch is one of data parallelism. Parameters split over such axes are
gathered where they are used (ZeRO-3, Rajbhandari et al., 2020; FSDP); if only the optimizer state is, the plan is
ZeRO-1, or ZeRO-2 where sums of gradients are split too. Parameters split over other axes are tensor parallel
(Megatron, Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Layout
from autopar.plan.content import PlanContent
from autopar.plan.groups import InputGroup, input_groups
from autopar.plan.types import InputRecord, dtype_and_shape

# Tensors that are not named by themselves: the share of all bytes of parameters, and how many are named.
_LEAST_SHARE, _MOST_NAMED = 0.02, 3
_DIMS = ("rows", "columns")


@dataclass(frozen=True)
class _Axes:
    """Sizes of the mesh axes of each stage, and those that split examples."""

    sizes: tuple[dict[str, int], ...]
    data: tuple[frozenset[str], ...]

    def num_shards(self, i: InputRecord, *, data: bool) -> int:
        """Over how many devices data axes, or others, split an argument."""
        axes = [a for a in Layout.parse(i.layout).axes if (a in self.data[i.stage]) == data]
        return math.prod(self.sizes[i.stage][a] for a in axes)


def plan_words(c: PlanContent) -> str:
    """One sentence that names the plan: ``8-way data parallel, optimizer state split 8 ways (ZeRO-1)``."""
    axes = _axes(c)
    said = []
    if c.pipeline is not None and c.pipeline.members:
        said.append(branches_words(c))
    elif len(c.stages) > 1:
        said.append(f"pipeline of {len(c.stages)} stages ({c.schedule}, {c.num_microbatches} microbatches)")
    said += _of_batch(c, axes)
    said += _of_parameters(c, axes)
    if c.num_microbatches > 1 and len(c.stages) == 1:
        said.append(f"gradients accumulated over {c.num_microbatches} microbatches")
    if any(s.form.remat != "none" for s in c.stages):
        levels = sorted({s.form.remat for s in c.stages} - {"none"})
        said.append(f"{' and '.join(levels)} recomputation")
    if any(s.form.segment_layers for s in c.stages):
        layers = max(s.form.segment_layers for s in c.stages)
        said.append("each layer computed again" if layers == 1 else f"segments of {layers} layers computed again")
    if any(s.host_bytes for s in c.stages):
        updated = any(r.on_host for part in (c, *c.parts) for r in part.operators)
        said.append("state of the update in host memory" + (", updated there (ZeRO-Offload)" if updated else ""))
    if any(s.form.slices_ahead is not None for s in c.stages):
        ahead = max(s.form.slices_ahead or 0 for s in c.stages)
        said.append("layers fetched from host memory one " + ("ahead" if ahead else "by one") + " (L2L)")
    if any(s.form.backward_update for s in c.stages):
        said.append("layers updated inside of the backward loop (no stack of gradients)")
    return ", ".join(said) if said else "arguments whole on every device"


def branches_words(c: PlanContent) -> str:
    """What runs side by side: ``branches side by side: params['image'] on devices 0-3, params['text'] on 4-7``.

    Of stages on the same devices the one that computes longest gives the name, by the parameters that it has.
    """
    heaviest: dict[tuple[int, ...], int] = {}
    for n, stage in enumerate(c.stages):
        other = heaviest.get(stage.devices)
        if other is None or stage.compute_time > c.stages[other].compute_time:
            heaviest[stage.devices] = n
    named = (f"{_stage_name(c, n)} on {_devices_text(devices)}" for devices, n in sorted(heaviest.items()))
    counts = "" if c.num_microbatches == 1 else f" ({c.num_microbatches} microbatches)"
    return "branches side by side: " + ", ".join(named) + counts


def _stage_name(c: PlanContent, stage: int) -> str:
    """The shortest paths that the parameters of a stage have and those of others have not, or its number."""
    parameters = [i for i in c.inputs if i.role == "parameter"]
    others = [i.path for i in parameters if i.stage != stage]
    names: dict[str, None] = {}
    for path in (i.path for i in parameters if i.stage == stage):
        ends = [m.start() for m in re.finditer(r"[\[.]", path) if m.start()] + [len(path)]
        names[next((path[:e] for e in ends if not any(o.startswith(path[:e]) for o in others)), path)] = None
    return " and ".join(names) if 0 < len(names) <= _MOST_NAMED else f"stage {stage}"


def _devices_text(devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]}"
    return f"devices {devices[0]}-{devices[-1]}"


def _axes(c: PlanContent) -> _Axes:
    sizes = tuple(s.mesh_shape for s in c.stages)
    data: list[set[str]] = [set() for _ in sizes]
    for i in c.inputs:
        dims = Layout.parse(i.layout).dims
        if i.role == "batch" and dims:
            data[i.stage].update(dims[0])
    # A later stage takes no batch of its own, or only labels; its axes are named as those of the first.
    common = set().union(*data)
    return _Axes(sizes, tuple(frozenset(d or common) for d in data))


def _of_batch(c: PlanContent, axes: _Axes) -> list[str]:
    batch = [i for i in c.inputs if i.role == "batch"]
    examples = max((math.prod(axes.sizes[i.stage][a] for a in d[0]) for i in batch if (d := _dims(i))), default=1)
    inner = max(
        (math.prod(axes.sizes[i.stage][a] for dim in d[1:] for a in dim) for i in batch if (d := _dims(i))), default=1
    )
    said = [f"{examples}-way data parallel"] if examples > 1 else []
    return [*said, f"inputs split {inner} ways along a later dim (sequence)"] if inner > 1 else said


def _dims(i: InputRecord) -> tuple[tuple[str, ...], ...]:
    return Layout.parse(i.layout).dims


def _bytes(records: Sequence[InputRecord]) -> int:
    return sum(_elements(i) for i in records)


def _elements(i: InputRecord) -> int:
    return math.prod(dtype_and_shape(i.type)[1])


def _of_parameters(c: PlanContent, axes: _Axes) -> list[str]:
    groups = [g for g in input_groups(c.inputs) if g.first.role == "parameter"]
    parameters = [i for g in groups for i in g.members]
    total = _bytes(parameters)
    if not total:
        return []
    said = []
    tensor = [i for i in parameters if axes.num_shards(i, data=False) > 1]
    if _bytes(tensor) > 0.5 * total:
        num_shards = max(axes.num_shards(i, data=False) for i in tensor)
        said.append(f"{num_shards}-way tensor parallel")
    sharded = [i for i in parameters if axes.num_shards(i, data=True) > 1]
    if _bytes(sharded) > 0.5 * total:
        num_shards = max(axes.num_shards(i, data=True) for i in sharded)
        said.append(f"parameters, gradients and optimizer state split {num_shards} ways (ZeRO-3)")
    else:
        said += _of_optimizer(c, axes)
    named = [text for g in groups if (text := _named(g, axes, total, bool(said)))]
    return [*said, *named[:_MOST_NAMED]]


def _of_optimizer(c: PlanContent, axes: _Axes) -> list[str]:
    """What is said where parameters are whole in each data-parallel group."""
    state = [i for i in c.inputs if i.role == "optimizer"]
    split = [i for i in state if axes.num_shards(i, data=True) > 1]
    if not split or _bytes(split) <= 0.5 * _bytes(state):
        return []
    sums = any(0 < s.accumulation_bytes <= s.memory.parameters // 2 for s in c.stages)
    num_shards = max(axes.num_shards(i, data=True) for i in split)
    return [f"optimizer state split {num_shards} ways ({'ZeRO-2' if sums else 'ZeRO-1'})"]


def _named(g: InputGroup, axes: _Axes, total: int, others: bool) -> str:
    """What is said of a group of parameters that is large and lies in a way of its own; "" of others."""
    dims = _dims(g.first)
    split = [d for d, a in enumerate(dims) if a]
    if _bytes(g.members) < _LEAST_SHARE * total or (not split and not others):
        return ""
    table = "embed" in g.name.lower() and len(dims) == 2
    experts = "expert" in g.name.lower() and len(dims) == 3
    if table and split:
        return f"{g.title} split by {'vocabulary' if split[0] == 0 else 'features'}"
    if experts and 0 in split:
        return f"{g.title} split by expert"
    if len(dims) == 2 and len(split) == 1 and axes.num_shards(g.first, data=False) > 1:
        return f"{g.title} split by {_DIMS[split[0]]}"
    return ""
