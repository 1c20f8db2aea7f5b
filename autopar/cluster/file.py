"""The plain form of a cluster, read strictly: what a TOML file holds, and the JSON that a plan stores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from autopar.cluster.checks import positive, whole
from autopar.cluster.device import ConvolutionForm, ConvolutionKind, ConvolutionRate, Curve, Device
from autopar.cluster.group import LinkSpec, MeasuredCollective, NodeGroup
from autopar.errors import ClusterError

# The bound is there to refuse inf; NaN fails every comparison.
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
#: More nodes, or devices of one, no cluster has; problems of a wrong size would not end.
_Count = Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Curve = _Fraction | Annotated[list[tuple[_Positive, _Fraction]], msgspec.Meta(min_length=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _ConvolutionFile(_Strict, frozen=True):
    kind: ConvolutionKind
    spatial_dims: Annotated[int, msgspec.Meta(ge=1, le=64)]
    multiplication_s: _Positive
    window_s: _NotNegative = 0.0
    kernel_s: _NotNegative = 0.0
    result_s: _NotNegative = 0.0
    scattered_s: _NotNegative = 0.0
    narrow_run_s: _NotNegative = 0.0
    form: ConvolutionForm = "windows"


class _DeviceFile(_Strict, frozen=True):
    kind: _Text
    memory_bytes: _Positive
    memory_bandwidth: _Positive
    peak_flops: dict[str, Any]  # checked below, since msgspec does not name the key of a wrong value
    compute_efficiency: _Curve = 1.0
    memory_efficiency: _Curve = 1.0
    launch_s: _NotNegative = 0.0
    jax_kinds: list[_Text] = []
    convolution_efficiency: _Curve | None = None
    kernel_gradient_efficiency: _Curve | None = None
    convolutions: list[_ConvolutionFile] = []
    reorder_efficiency: _Curve | None = None
    reduction_efficiency: _Curve | None = None
    first_touch_bandwidth: _Positive | None = None
    function_s: dict[str, Any] = {}  # checked below, as peak_flops


#: Fields of a device that are curves.
_CURVES = tuple(name for name in _DeviceFile.__struct_fields__ if name.endswith("_efficiency"))


class _CollectiveFile(_Strict, frozen=True):
    kind: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
    devices: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]
    seconds: Annotated[tuple[tuple[_Positive, _Positive], ...], msgspec.Meta(min_length=1)]


class _LinkFile(_Strict, frozen=True):
    bandwidth: _Positive
    latency_s: _NotNegative
    efficiency: _Fraction = 1.0
    node_bandwidth: _Positive | None = None
    torus_dims: _Count = 1
    switch_share: _Fraction | None = None
    group_shares: tuple[tuple[_Count, _Fraction], ...] = ()
    collectives: tuple[_CollectiveFile, ...] = ()
    refill_bandwidth: _Positive | None = None
    refill_bytes: _Positive | None = None


class _GroupFile(_Strict, frozen=True):
    count: _Count
    devices_per_node: _Count
    device: _DeviceFile
    intra: _LinkFile
    inter: _LinkFile | Literal["intra"]
    host_memory_bytes: _Positive | None = None
    host_bandwidth: _Positive | None = None
    slices: _LinkFile | None = None
    measured: str = ""
    device_dollars_per_hour: _Positive | None = None


class _ClusterFile(_Strict, frozen=True):
    name: _Text
    groups: Annotated[list[_GroupFile], msgspec.Meta(min_length=1)]


# What a table may hold, by its path without indices.
_TABLES: Mapping[str, type[msgspec.Struct]] = {
    "": _ClusterFile,
    "groups": _GroupFile,
    "groups.device": _DeviceFile,
    "groups.device.convolutions": _ConvolutionFile,
    "groups.intra": _LinkFile,
    "groups.intra.collectives": _CollectiveFile,
    "groups.inter": _LinkFile,
    "groups.slices": _LinkFile,
}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _error(where: str, error: msgspec.ValidationError) -> ClusterError:
    """msgspec's message as a `ClusterError` that names the key by its whole path."""
    what, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    field = re.search(r"(unknown|missing required) field `(.*)`", what)
    table = path if field else path.rpartition(".")[0]
    schema = _TABLES.get(re.sub(r"\[\d+\]", "", table))
    remedy = None
    if schema:
        keys = ", ".join(f"{f.name}{' (required)' if f.required else ''}" for f in msgspec.structs.fields(schema))
        remedy = f"valid keys of {table or 'the file'}: {keys}"
    if field and schema is _ConvolutionFile:
        remedy = f"{remedy}; `autopar calibrate` measures again what an older version wrote"
    if table != path and path.endswith(".inter"):
        remedy = 'give a table of a link, or "intra" where the link inside a node reaches the other nodes'
    if field and field.group(1) == "unknown":
        return ClusterError(f"{where}: unknown key {_join(path, field.group(2))}", remedy=remedy)
    if field:
        return ClusterError(f"{where}: missing key {_join(path, field.group(2))}", remedy=remedy)
    return ClusterError(f"{where}: {path or 'the file'}: {what[:1].lower()}{what[1:]}", remedy=remedy)


def _curve(where: str, value: float | list[tuple[float, float]]) -> Curve:
    try:
        return Curve.constant(value) if isinstance(value, float) else Curve(tuple(value))
    except ClusterError as error:
        raise ClusterError(f"{where}: {error.fact}", remedy=error.remedy) from error


def _fields(value: Any, names: Sequence[str], **changed: Any) -> dict[str, Any]:
    """Fields of a table or an object by name, some of them changed: both forms of a cluster have the same names."""
    return {name: getattr(value, name) for name in names} | changed


def _link(where: str, table: _LinkFile) -> LinkSpec:
    try:
        measured = tuple(MeasuredCollective(c.kind, c.devices, c.seconds) for c in table.collectives)
        return LinkSpec(**_fields(table, _LinkFile.__struct_fields__, collectives=measured))
    except ClusterError as error:  # all else was checked before
        raise ClusterError(f"{where}.collectives: {error.fact}", remedy=error.remedy) from error


def _device(where: str, table: _DeviceFile) -> Device:
    rates = {d: positive(f"{where}.peak_flops.{d}", rate) for d, rate in table.peak_flops.items()}
    if "f32" not in rates:
        raise ClusterError(
            f"{where}.peak_flops: missing key f32; there are {sorted(rates)}",
            cause="f32 is the rate of every dtype that is not listed",
            remedy="add peak_flops.f32 in FLOP/s",
        )

    curves = {n: getattr(table, n) for n in _CURVES}
    return Device(
        **_fields(
            table,
            _DeviceFile.__struct_fields__,
            memory_bytes=whole(f"{where}.memory_bytes", table.memory_bytes),
            peak_flops=tuple(rates.items()),
            jax_kinds=tuple(table.jax_kinds),
            convolutions=tuple(ConvolutionRate(**msgspec.structs.asdict(rate)) for rate in table.convolutions),
            function_s=tuple((n, positive(f"{where}.function_s.{n}", s)) for n, s in table.function_s.items()),
            **{n: None if c is None else _curve(f"{where}.{n}", c) for n, c in curves.items()},
        )
    )


def parse(data: Any, where: str) -> tuple[str, tuple[NodeGroup, ...]]:
    """Name and groups of the cluster whose plain form is ``data`` (dicts, lists, texts, numbers).

    Args:
        data: as `plain` makes it, or as read from TOML or JSON.
        where: what ``data`` was read from, for messages.

    Raises:
        ClusterError: a key is unknown or missing, or a value impossible; it names the key.
    """
    try:
        table = msgspec.convert(data, _ClusterFile)
    except msgspec.ValidationError as error:
        raise _error(where, error) from None
    groups = []
    for i, group in enumerate(table.groups):
        path = f"{where}: groups[{i}]"
        host = group.host_memory_bytes
        links = {"intra": group.intra, "inter": group.inter, "slices": group.slices}
        changed: dict[str, Any] = {
            name: _link(f"{path}.{name}", link) if isinstance(link, _LinkFile) else link for name, link in links.items()
        }
        if host is not None:
            changed["host_memory_bytes"] = whole(f"{path}.host_memory_bytes", host)
        device = _device(f"{path}.device", group.device)
        groups.append(NodeGroup(**_fields(group, _GroupFile.__struct_fields__, device=device, **changed)))
    return table.name, tuple(groups)


def plain(name: str, groups: Sequence[NodeGroup]) -> dict[str, Any]:
    """The plain form of a cluster, without the keys that have their default value: `parse` reads it back."""

    def curve(value: Curve | None) -> Any:
        if value is None:
            return None
        return value.points[0][1] if len(value.points) == 1 else [list(p) for p in value.points]

    def device(value: Device) -> _DeviceFile:
        fields = _fields(
            value,
            _DeviceFile.__struct_fields__,
            peak_flops=dict(value.peak_flops),
            jax_kinds=list(value.jax_kinds),
            convolutions=[_ConvolutionFile(**asdict(rate)) for rate in value.convolutions],
            function_s=dict(value.function_s),
            **{name: curve(getattr(value, name)) for name in _CURVES},
        )
        return _DeviceFile(**fields)

    def link(value: LinkSpec | str | None) -> Any:
        if not isinstance(value, LinkSpec):
            return value
        measured = tuple(_CollectiveFile(**asdict(m)) for m in value.collectives)
        return _LinkFile(**_fields(value, _LinkFile.__struct_fields__, collectives=measured))

    tables = [
        _GroupFile(
            **_fields(
                g,
                _GroupFile.__struct_fields__,
                device=device(g.device),
                **{name: link(getattr(g, name)) for name in ("intra", "inter", "slices")},
            )
        )
        for g in groups
    ]
    data: dict[str, Any] = msgspec.to_builtins(_ClusterFile(name, tables))
    return data
