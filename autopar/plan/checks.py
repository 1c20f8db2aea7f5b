"""Whether what a file says can be a plan: times that are times, layouts of their arrays, stages that exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.errors import PlanMismatchError
from autopar.ir.layout import Layout
from autopar.plan.content import PlanContent

#: Bytes of a plan's text.
MOST_BYTES = 1 << 28
#: Devices of a plan, and parts of its batch.
_MOST_DEVICES, _MOST_MICROBATCHES = 1 << 24, 1 << 20


def check_content(content: PlanContent, origin: str) -> None:
    """Raises PlanMismatchError, with the field, where content is no plan's.

    Args:
        content: of a file.
        origin: what it was read from.
    """
    for field, value in _numbers(content, "plan"):
        if not math.isfinite(value) or value < 0:
            raise _wrong(origin, field, f"{value!r} is neither a time nor a cost")
    _check(content, origin, "plan")


def _check(content: PlanContent, origin: str, at: str) -> None:
    if content.peak_memory < 0 or content.memory_limit < 0:
        raise _wrong(origin, f"{at}.peak_memory", "bytes are 0 or more")
    if not 1 <= content.num_microbatches <= _MOST_MICROBATCHES:
        raise _wrong(origin, f"{at}.num_microbatches", f"it is 1 to {_MOST_MICROBATCHES}")
    if not content.stages or content.stack_groups < 1:
        raise _wrong(origin, f"{at}.stages", "a plan has one or more")
    for n, stage in enumerate(content.stages):
        devices = math.prod(size for _, size in stage.mesh_axes)
        right = all(size > 0 for _, size in stage.mesh_axes) and len(stage.devices) == devices
        if not right or not all(0 <= d < _MOST_DEVICES for d in stage.devices):
            raise _wrong(origin, f"{at}.stages[{n}].devices", "they are not those of its mesh")
    for name in ("inputs", "outputs", "operators"):
        for n, record in enumerate(getattr(content, name)):
            if not 0 <= record.stage < len(content.stages):
                raise _wrong(origin, f"{at}.{name}[{n}].stage", f"there are {len(content.stages)} stages")
    axes = [{a for a, _ in stage.mesh_axes} for stage in content.stages]
    for name in ("inputs", "outputs", "copies"):
        for n, record in enumerate(getattr(content, name)):
            known = set().union(*axes) if name == "copies" else axes[record.stage]
            _check_layout(record, known, origin, f"{at}.{name}[{n}]")
    for n, part in enumerate(content.parts):
        _check(part, origin, f"{at}.parts[{n}]")


def _check_layout(record: Any, axes: set[str], origin: str, at: str) -> None:
    try:
        layout = Layout.parse(record.layout)
    except ValueError as error:
        raise _wrong(origin, f"{at}.layout", str(error)) from error
    unknown = sorted({*layout.partial, *(a for dim in layout.dims for a in dim)} - axes)
    if unknown:
        raise _wrong(origin, f"{at}.layout", f"{record.layout} names {', '.join(unknown)}, which its mesh has not")
    text = getattr(record, "type", None)
    if text is None:
        return
    inner = text.partition("[")[2].removesuffix("]")
    dims = inner.split(",") if inner else []
    if not all(d.strip().isdecimal() for d in dims):
        raise _wrong(origin, f"{at}.type", f"{text} is no type of an array")
    if len(layout.dims) != len(dims):
        raise _wrong(origin, f"{at}.layout", f"{record.layout} is no layout of {text}")


def _numbers(value: Any, at: str) -> Iterator[tuple[str, float]]:
    """All floats of plain data, with where they are."""
    if isinstance(value, float):
        yield at, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, tuple):
        for n, item in enumerate(value):
            yield from _numbers(item, f"{at}[{n}]")


def _wrong(origin: str, field: str, why: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{origin} is not a plan: {field}: {why}",
        cause="the file was changed by hand, or damaged",
        remedy="write the plan again with Plan.save",
    )
