"""A plan in the field's words: how many ways of data, tensor, expert and pipeline parallelism, and which ZeRO.

`plan_words` is the place to start. `Stage.axis_roles` says what each mesh axis splits in the products with parameters:
examples (data parallelism), tokens (context), images (spatial), experts, or a dim of the parameter (tensor parallelism;
Megatron, Shoeybi et al., 2019). Parameters that are split over the other axes are gathered where they are used (ZeRO-3,
Rajbhandari et al., 2020; FSDP); if only the optimizer state is, the plan is ZeRO-1, or ZeRO-2 where the gradients of
microbatches are added up in parts too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

from autopar.errors.names import counted
from autopar.ir import Layout
from autopar.plan.arguments import InputGroup, input_groups
from autopar.plan.content import PlanContent
from autopar.plan.types import AxisRole, AxisUse, InputRecord, Stage, dtype_and_shape

# Tables that are named by themselves: the share of all bytes of parameters, and how many are named.
_LEAST_SHARE, _MOST_NAMED = 0.02, 3
_MATRIX_DIMS: Final = (
    (frozenset({-1}), "columns"),
    (frozenset({-2}), "rows"),
    (frozenset({-2, -1}), "both dims of each matrix"),
)
#: Shares of products from which a use of an axis is named: of experts, and of others; and below which it is not of all.
_EXPERTS_FROM, _NAMED_FROM, _ALL_FROM = 0.01, 0.1, 0.9
#: Share above which something is most of the whole.
_MOST: Final = 0.5
_USES: Final[Mapping[AxisUse, str]] = MappingProxyType(
    {
        "data": "data parallel",
        "context": "context parallel",
        "space": "spatial parallel",
        "expert": "expert parallel",
        "tensor": "tensor parallel",
    }
)


@dataclass(frozen=True)
class _StageAxes:
    """The mesh axes of a stage.

    Args:
        sizes: by axis.
        roles: uses that are named, with their shares.
    """

    sizes: Mapping[str, int]
    roles: tuple[AxisRole, ...]

    @cached_property
    def _of_matrices(self) -> frozenset[str]:
        """Axes that share matrices: those of tensor parallelism in more products than they have another use in.

        Over other axes parameters that are split are gathered where most products use them.
        """
        most = {axis: max(r.share for r in self.roles if r.axis == axis) for axis in self._over["tensor"]}
        return frozenset(r.axis for r in self.roles if r.use == "tensor" and r.share == most[r.axis])

    @cached_property
    def _over(self) -> Mapping[AxisUse, frozenset[str]]:
        return {use: frozenset(r.axis for r in self.roles if r.use == use) for use in _USES}

    def num_parts(self, axes: Iterable[str]) -> int:
        """Product of the sizes of mesh axes: the parts into which they split a dim together."""
        return math.prod(self.sizes[a] for a in axes)

    def parts_of(self, use: AxisUse) -> int:
        """Product of the sizes of the axes of a use, as data or tensor parallelism; 1 if there are none."""
        return self.num_parts(self._over[use])

    def share_of(self, use: AxisUse) -> float:
        """The least share of products in which an axis of a use has it; those of experts aside."""
        shares = [r.share + self._of_experts(r.axis) for r in self.roles if r.use == use]
        return min(shares, default=0.0)

    def _of_experts(self, axis: str) -> float:
        return sum(r.share for r in self.roles if r.axis == axis and r.use == "expert")

    def state_axes(self, i: InputRecord) -> frozenset[str]:
        """Axes that split an argument besides those that share its matrices: those of ZeRO."""
        dims = _dims(i)
        split = frozenset(a for dim in dims for a in dim)
        # An axis of experts splits matrices of experts along their dim, and other parameters as ZeRO does.
        experts = {a for dim in dims[:-2] for a in dim if a in self._over["expert"]}
        return split - self._of_matrices - experts

    def copies(self, i: InputRecord) -> int:
        """Number of devices that hold each part of an argument, but for those that share its matrices."""
        whole = set(self.sizes) - self._of_matrices - set(Layout.parse(i.layout).axes)
        return self.num_parts(whole)

    def tensor_dims(self, i: InputRecord) -> frozenset[int]:
        """The last two dims of a matrix, counted from the end, as far as axes of tensor parallelism split them."""
        dims = _dims(i)
        return frozenset(d for d in (-2, -1) if len(dims) >= 2 and self._of_matrices.intersection(dims[d]))


def plan_words(c: PlanContent) -> str:
    """One sentence that names the plan: ``8-way data parallel, optimizer state split 8 ways (ZeRO-1)``."""
    axes = _axes(c)
    said = []
    if c.pipeline is not None and c.pipeline.members:
        said.append(branches_words(c))
    elif len(c.stages) > 1:
        said.append(f"pipeline of {len(c.stages)} stages ({c.schedule}, {counted(c.num_microbatches, 'microbatch')})")
    said += _of_axes(c, axes)
    said += _of_parameters(c, axes)
    if said and (groups := _repeated(c)) > 1:
        said.append(f"repeated on {groups} groups of devices")
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
    """Branches that run side by side: ``branches side by side: params['image'] on devices 0-3, params['text'] on 4-7``.

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
    parameters = [r for r in _held(c) if r.role == "parameter"]
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


def _axes(c: PlanContent) -> tuple[_StageAxes, ...]:
    """Sizes and named uses of the mesh axes of each stage; a stage without products has the uses of the others."""
    uses = [s.axis_roles or _inferred(c, n, s) for n, s in enumerate(c.stages)]
    common = max(uses, key=len, default=())
    parameters = [r for r in _held(c) if r.role == "parameter"]
    total = sum(map(_bytes, parameters))
    stages = []
    for stage, named in zip(c.stages, uses, strict=True):
        roles = named or common
        sizes = {a: n for a, n in stage.mesh_axes if n > 1}
        split = Counter({a: 0 for a in sizes})
        for i in parameters:
            split.update(dict.fromkeys(Layout.parse(i.layout).axes, _bytes(i)))
        listed = (r for r in roles if r.axis in sizes and _is_named(r, roles, split[r.axis] / max(1, total)))
        stages.append(_StageAxes(sizes, tuple(listed)))
    return tuple(stages)


def _is_named(role: AxisRole, roles: Sequence[AxisRole], split_share: float) -> bool:
    """Whether the use of an axis is part of a plan's name.

    A few products that are split by a dim of a parameter that is whole are not tensor parallelism; experts are few
    products, and examples share their axis.

    Args:
        role: the use.
        roles: all uses of the stage.
        split_share: part of the parameters that the axis splits between steps.
    """
    others = {r.use: r.share for r in roles if r.axis == role.axis and r.use != role.use}
    if role.use == "expert":
        return role.share >= _EXPERTS_FROM
    if role.use == "data" and others.get("expert", 0.0) >= _EXPERTS_FROM:
        return True
    if role.use == "tensor" and split_share < _NAMED_FROM:
        return role.share > max(others.values(), default=0.0)
    return role.share >= _NAMED_FROM


def _inferred(c: PlanContent, number: int, stage: Stage) -> tuple[AxisRole, ...]:
    """The uses of axes as far as arguments tell them, for plans without `Stage.axis_roles`.

    An axis that splits most bytes of the batch by its first dim is one of data parallelism, by another dim one of
    context parallelism; another one that splits parameters is one of tensor parallelism.
    """
    batch = [r for r in _held(c) if r.role == "batch" and r.stage in (number, 0)]
    roles = []
    for axis, size in stage.mesh_axes:
        dims = [_dims(i) for i in batch]
        first = sum(_bytes(i) for i, d in zip(batch, dims, strict=True) if d and axis in d[0])
        later = sum(_bytes(i) for i, d in zip(batch, dims, strict=True) if any(axis in dim for dim in d[1:]))
        of_parameters = any(i.role == "parameter" and axis in Layout.parse(i.layout).axes for i in c.inputs)
        if size > 1 and 2 * max(first, later) > sum(map(_bytes, batch)):
            roles.append(AxisRole(axis, "data" if first >= later else "context", 1.0))
        elif size > 1 and of_parameters:
            roles.append(AxisRole(axis, "tensor", 1.0))
    return tuple(roles)


def _of_axes(c: PlanContent, stages: Sequence[_StageAxes]) -> list[str]:
    """The parallelism inside of stages: ``4-way data parallel``."""
    said = []
    for use, name in _USES.items():
        counts = sorted({n for s in stages if (n := s.parts_of(use)) > 1})
        if not counts:
            continue
        text = f"{counts[0]}-way {name}" if len(counts) == 1 else f"{counts[0]}- to {counts[-1]}-way {name}"
        share = min(s.share_of(use) for s in stages if s.parts_of(use) > 1)
        if use == "tensor":
            text += _matrices(c, stages)
        said.append(text + (f" in {share:.0%} of the products" if share < _ALL_FROM and use != "expert" else ""))
    return said


def _repeated(c: PlanContent) -> int:
    """The number of groups of devices that compute the same: the size of the axes that no product and no argument of a
    stage is split by, the least of all stages.
    """
    split: dict[int, set[str]] = {n: {r.axis for r in s.axis_roles} for n, s in enumerate(c.stages)}
    for i in _held(c):
        split[i.stage].update(Layout.parse(i.layout).axes)
    return min(math.prod(n for a, n in s.mesh_axes if a not in split[k]) for k, s in enumerate(c.stages))


def _matrices(c: PlanContent, stages: Sequence[_StageAxes]) -> str:
    """The dims of matrices that are split: `` by columns and rows (Megatron)`` where some are split by one and some by
    the other; "" where no parameter is.
    """
    by_dims: Counter[frozenset[int]] = Counter()
    for i in _held(c):
        if i.role == "parameter" and not _is_table(i.path, i) and (split := stages[i.stage].tensor_dims(i)):
            by_dims[split] += _bytes(i)
    least = _NAMED_FROM * sum(by_dims.values())
    kinds = [words for dims, words in _MATRIX_DIMS if by_dims[dims] >= least > 0]
    return f" by {' and '.join(kinds)}" + " (Megatron)" * (kinds == ["columns", "rows"]) if kinds else ""


def _held(c: PlanContent) -> list[InputRecord]:
    """The arguments, those that several stages hold as a record for each part."""
    return [r for i in c.inputs for r in i.of_stages]


def _is_table(name: str, i: InputRecord) -> bool:
    """Whether a parameter is a table of embeddings, by its name."""
    return "embed" in name.lower() and len(_dims(i)) == 2


def _dims(i: InputRecord) -> tuple[tuple[str, ...], ...]:
    return Layout.parse(i.layout).dims


def _bytes(i: InputRecord) -> int:
    """Elements of an argument, of which bytes are a multiple that is the same for most."""
    return math.prod(dtype_and_shape(i.type)[1])


@dataclass(frozen=True)
class _Split:
    """The number of parts that most of some state has.

    Args:
        num_parts: the number; 1 where most of it is whole.
        share: part of the state that has it.
        copies: of each part.
        is_all: whether a device holds no more, or little more, than if all of the state had it.
    """

    num_parts: int
    share: float
    copies: int
    is_all: bool = True

    @staticmethod
    def of(records: Iterable[InputRecord], stages: Sequence[_StageAxes]) -> _Split:
        """Splits of arguments, weighed by their bytes."""
        parts: Counter[tuple[int, int]] = Counter()
        for i in records:
            axes = stages[i.stage]
            parts[axes.num_parts(axes.state_axes(i)), axes.copies(i)] += _bytes(i)
        total = sum(parts.values())
        whole = sum(n for (count, _), n in parts.items() if count == 1)
        if not total or 2 * whole >= total:
            return _Split(1, 1.0, 1)
        (num_parts, copies), most = max(parts.items(), key=lambda item: (item[0][0] > 1, item[1], item[0]))
        held = sum(n / count for (count, _), n in parts.items())
        is_all = total / num_parts >= _ALL_FROM * held
        return _Split(num_parts, most / total, copies, is_all)

    @property
    def as_split(self) -> tuple[int, int, bool]:
        """Number of parts, copies of each, and whether a device holds no more than that."""
        return self.num_parts, self.copies, self.is_all

    def text(self, state: str) -> str:
        """``parameters split 8 ways``, with copies and the share that is split so."""
        most = "" if self.is_all and self.share >= _ALL_FROM else f"{min(self.share, 0.99):.0%} of "
        copies = f" in {self.copies} copies" if self.copies > 1 else ""
        return f"{most}{state} split {self.num_parts} ways{copies}"


def _of_parameters(c: PlanContent, stages: Sequence[_StageAxes]) -> list[str]:
    """The splits of parameters and optimizer state besides those of their matrices, and of tables."""
    groups = [g for g in input_groups(c.inputs) if g.first.role == "parameter"]
    parameters = [r for g in groups for i in g.members for r in i.of_stages]
    total = sum(map(_bytes, parameters))
    if not total:
        return []
    state = [r for r in _held(c) if r.role == "optimizer"]
    of_parameters, of_state = _Split.of(parameters, stages), _Split.of(state, stages)
    said = []
    if of_parameters.num_parts > 1:
        same = not state or of_state.as_split == of_parameters.as_split
        together = "parameters, gradients and optimizer state" if same else "parameters and gradients"
        said.append(of_parameters.text(together) + " (ZeRO-3)")
    if of_state.num_parts > 1 and of_state.as_split != of_parameters.as_split:
        zero = "" if of_parameters.num_parts > 1 else f" ({_stage_of_zero(c, state, stages)})"
        said.append(of_state.text("optimizer state") + zero)
    return [*said, *[text for g in groups if (text := _table(g, stages, total))][:_MOST_NAMED]]


def _stage_of_zero(c: PlanContent, state: Iterable[InputRecord], stages: Sequence[_StageAxes]) -> str:
    """The ZeRO stage of a plan that splits optimizer state and not parameters.

    Gradients of microbatches are added up whole in stage 1 and in parts in stage 2: the axes that split most of the
    optimizer state split most of them too. Without microbatches they are summed into the parts at once: both stages
    are one plan.

    Args:
        c: the plan.
        state: its optimizer state, by stage.
        stages: its mesh axes.
    """
    if c.num_microbatches == 1:
        return "ZeRO-1 and 2"
    if not any(s.axis_roles for s in c.stages):  # of an older version
        sums = [(s.accumulation_bytes or s.memory.gradients, s.memory.parameters) for s in c.stages]
        return "ZeRO-2" if any(0 < summed <= _MOST * held for summed, held in sums) else "ZeRO-1"
    shares = [{r.axis: r.gradients for r in s.axis_roles} for s in c.stages]
    in_parts, total = 0, 0
    for i in state:
        axes = stages[i.stage].state_axes(i)
        in_parts += _bytes(i) if all(shares[i.stage].get(a, 0.0) > _MOST for a in axes) and axes else 0
        total += _bytes(i)
    return "ZeRO-2" if in_parts > _MOST * total else "ZeRO-1"


def _table(g: InputGroup, stages: Sequence[_StageAxes], total: int) -> str:
    """The dim by which a large table of embeddings is split over axes that share matrices; "" of other parameters."""
    if not _is_table(g.name, g.first) or sum(map(_bytes, g.members)) < _LEAST_SHARE * total:
        return ""
    split = sorted(stages[g.first.stage].tensor_dims(g.first))
    return f"{g.title} split by {'vocabulary' if split[0] == -2 else 'features'}" if split else ""
