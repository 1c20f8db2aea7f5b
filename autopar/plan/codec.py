"""Plans as JSON: canonical text, a format version, a digest of the content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autopar.errors import PlanMismatchError
from autopar.ir.layout import Layout
from autopar.plan.content import PlanContent
from autopar.plan.details import NO_DETAILS, Details
from autopar.plan.types import InputRecord, dtype_and_shape
from autopar.plan.versions import FORMAT_VERSION, READABLE, upgraded


class _PlanDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    autopar_plan: int
    plan: PlanContent
    digest: str = ""
    details: Details = NO_DETAILS


def encode(content: PlanContent, details: Details = NO_DETAILS, *, proven: bool = True) -> str:
    """``content`` as JSON text, always the same for the same content and details.

    Args:
        content: of the plan.
        details: that are kept with it.
        proven: whether it is a search's plan, as it was made: the text then has its digest.
    """
    raw = msgspec.json.encode(_PlanDocument(FORMAT_VERSION, content, details=details))
    # Once around: a whole number in a field of floats is written as 1.0, as it will be after it was loaded.
    document = msgspec.to_builtins(msgspec.json.decode(raw, type=_PlanDocument))
    _leave_out_defaults(document["plan"])
    if proven:
        digest = _digest(document)
        document = {"autopar_plan": FORMAT_VERSION, "digest": digest, **document}
    raw = msgspec.json.encode(document)
    return msgspec.json.format(raw, indent=1).decode() + "\n"


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 of what a document says, whatever its spaces and the order of its keys."""
    said = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()


def _leave_out_defaults(plan: dict[str, Any]) -> None:
    """Drops what only plans with several stages, or little memory, have from the others; the cluster is nested."""
    with contextlib.suppress(ValueError, RecursionError):
        cluster = json.loads(plan["cluster"])
        if isinstance(cluster, dict) and _canonical(cluster) == plan["cluster"]:
            plan["cluster"] = cluster
    for name in ("pipeline", "cuts", "parts", "rewrites", "product_flops"):
        if not plan[name]:
            del plan[name]
    if plan["stack_groups"] == 1:
        del plan["stack_groups"]
    for name in ("unlimited_s", "sharding_bound"):
        if plan["search"][name] is None:
            del plan["search"][name]
    for part in plan.get("parts", ()):
        _leave_out_defaults(part)


def decode(text: str | bytes, origin: str = "the text") -> tuple[PlanContent, Details, bool]:
    """The content and details that `encode` wrote, or an older autopar's, and whether their digest is right.

    Raises:
        PlanMismatchError: the text is cut short, of another version, or no plan; the message names the field.
    """
    if len(text) > MOST_BYTES:
        raise PlanMismatchError(
            f"{origin} has {len(text)} characters; a plan has {MOST_BYTES} at most", cause="the file is not a plan"
        )
    try:
        version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("autopar_plan")
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise PlanMismatchError(
            f"{origin} is not a whole JSON document: {error}",
            cause="the file was cut short, or is not a plan",
            remedy="write the plan again with Plan.save",
        ) from error
    older = next((v for v in READABLE if version is not None and bytes(version) == str(v).encode()), None)
    if older is None and (version is None or bytes(version) != str(FORMAT_VERSION).encode()):
        text_version = "none" if version is None else bytes(version).decode()
        raise PlanMismatchError(
            f"{origin} has plan format version {text_version}; this autopar reads version {FORMAT_VERSION}",
            cause="the plan was written by another version of autopar, or is not a plan",
            remedy="plan again with this version",
        )
    try:
        plain = msgspec.json.decode(text)
        proven = plain.get("digest") == _digest(plain)
        if older is not None:
            plain = upgraded(plain, older)
        _with_cluster_text(plain["plan"])
        document = msgspec.convert(plain, type=_PlanDocument)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, LookupError, TypeError) as error:
        raise PlanMismatchError(
            f"{origin} is not a plan: {error}", remedy="write the plan again with Plan.save"
        ) from error
    check_content(document.plan, origin)
    return document.plan, document.details, proven


def _with_cluster_text(plan: Any) -> None:
    """Puts the canonical text of clusters in the place of their JSON, as `Cluster.to_json` writes it."""
    if isinstance(plan["cluster"], dict):
        plan["cluster"] = _canonical(plan["cluster"])
    for part in plan.get("parts", ()):
        _with_cluster_text(part)


def _canonical(cluster: dict[str, Any]) -> str:
    return json.dumps(cluster, sort_keys=True, separators=(",", ":"))


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
    for n, record in enumerate(content.inputs):
        _check_parts(record, axes, origin, f"{at}.inputs[{n}].parts")
    for n, part in enumerate(content.parts):
        _check(part, origin, f"{at}.parts[{n}]")


def _check_parts(record: InputRecord, axes: Sequence[set[str]], origin: str, at: str) -> None:
    """Raises PlanMismatchError unless the parts of an argument are on stages of the plan and make up the argument."""
    if not record.parts:
        return
    first = record.parts[0]
    if (first.stage, first.layout, first.memory) != (record.stage, record.layout, record.memory):
        raise _wrong(origin, at, "the first part is not where the argument is")
    if not all(0 <= p.stage < len(axes) for p in record.parts):
        raise _wrong(origin, at, f"there are {len(axes)} stages")
    slices = [p.slices for p in record.parts if p.slices is not None]
    if slices:
        end, size = 0, next(iter(dtype_and_shape(record.type)[1]), 0)
        for start, after in slices:
            if not 0 <= start <= end or not start < after <= size:
                raise _wrong(origin, at, f"their slices are not those of {record.type}")
            end = max(end, after)
        if end < size or len(slices) < len(record.parts):
            raise _wrong(origin, at, f"their slices are not those of {record.type}")
    for n, part in enumerate(record.of_stages):
        _check_layout(part, axes[part.stage], origin, f"{at}[{n}]")


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
        raise _wrong(origin, f"{at}.type", f"{text} is not an array type")
    if len(layout.dims) != len(dims):
        raise _wrong(origin, f"{at}.layout", f"{record.layout} is not a layout of {text}")


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
