"""A cluster file of figures that were measured: TOML with the date and the spread in comments."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Curve, LinkSpec, NodeGroup
from autopar.cost.calibration import Calibration, Rate
from autopar.cost.links import Network


@dataclass(frozen=True)
class Circumstances:
    """What a measurement was made with.

    Args:
        date: when.
        machine: processor or accelerator, as its maker calls it.
        versions: of jax and jaxlib.
        repeats: how often each program was timed.
    """

    date: datetime.date
    machine: str
    versions: str
    repeats: int


@dataclass(frozen=True)
class MeasuredGroup:
    """Equal nodes of which one was measured.

    Args:
        group: what the nodes would be without measuring; what was not measured is taken from it.
        found: what was measured of the devices.
        how: the circumstances.
        network: what connects the nodes; None where it was not measured.
        between: the circumstances of that, as "2 workers on 2 machines, over sockets".
        driver_s: seconds that a call of all workers by the driver takes.
    """

    group: NodeGroup
    found: Calibration
    how: Circumstances
    network: Network | None = None
    between: str = ""
    driver_s: float = 0.0


def file_text(name: str, groups: Sequence[MeasuredGroup]) -> str:
    """A cluster file.

    Args:
        name: of the cluster.
        groups: its groups.
    """
    return "\n".join([f'name = "{name}"', *(line for g in groups for line in ("", *_group(g)))]) + "\n"


def _group(measured: MeasuredGroup) -> list[str]:
    group, found, how = measured.group, measured.found, measured.how
    d = group.device
    label = "CPU" if "cpu" in d.jax_kinds else d.kind
    kinds = ", ".join(f'"{k}"' for k in d.jax_kinds)
    lines = [
        f"# {group.devices_per_node} x {label}, measured by `autopar calibrate` on {how.date.isoformat()}:",
        f"# {how.machine}, {how.versions}. Medians of {how.repeats} repetitions that go round all programs; the spread",
        "# is the distance of the quartiles over the median. Efficiencies are [FLOPs or bytes of an operator, share].",
        "[[groups]]",
        f"count = {group.count}",
        f"devices_per_node = {group.devices_per_node}",
        "",
        "[groups.device]",
        f'kind = "{label}"',
        f"jax_kinds = [{kinds}]",
        f"memory_bytes = {d.memory_bytes}",
        f"# Elementwise operators and sums, all devices at once, read and written; spread {found.memory.spread:.1%}.",
        f"memory_bandwidth = {found.memory.peak:.4g}",
        f"memory_efficiency = {_curve(found.memory.efficiency)}",
        "# Matrix products, all devices at once: " + "; ".join(map(_product, found.products)) + ".",
        "peak_flops = { " + ", ".join(f"{k} = {rate.peak:.4g}" for k, rate in found.products) + " }",
        f"compute_efficiency = {_curve(dict(found.products)['f32'].efficiency)}",
        f"# Chains of tiny products; spread {found.chain_spread:.1%}. A call of a program costs {found.call_s:.2g} s.",
        f"launch_s = {found.launch_s:.4g}",
        "",
        "[groups.intra]",
    ]
    if found.link is None:
        lines += ["# One device: not measured, taken from the file that knows such devices.", *_link(group.intra)]
    else:
        lines += [
            f"# Fitted to collectives of all devices: error {found.link_error:.1%}, spread {found.link_spread:.1%}.",
            f"bandwidth = {found.link.bandwidth:.4g}",
            f"latency_s = {found.link.latency_s:.4g}",
        ]
    return [*lines, "", "[groups.inter]", *_inter(measured)]


def _inter(measured: MeasuredGroup) -> list[str]:
    found, group = measured.network, measured.group
    if found is None:
        unknown = group.inter if isinstance(group.inter, LinkSpec) else group.intra
        return ["# Not measured: taken from the file that knows such devices.", *_link(unknown)]
    lines = [
        f"# Fitted to transfers between {measured.between}:",
        f"# error {found.error:.1%}, spread {found.spread:.1%}. A call by the driver takes {measured.driver_s:.2g} s.",
    ]
    if found.chain_share is not None:
        lines.append(
            f"# Transfers that follow each other take {found.chain_share:.2f} of what these figures add up to."
        )
    lines += [f"bandwidth = {found.link.bandwidth:.4g}", f"latency_s = {found.link.latency_s:.4g}"]
    if found.node_bandwidth is not None:
        lines.append(f"node_bandwidth = {found.node_bandwidth:.4g}")
    return lines


def _curve(curve: Curve) -> str:
    return "[" + ", ".join(f"[{x:.4g}, {y:.3f}]" for x, y in curve.points) + "]"


def _product(pair: tuple[str, Rate]) -> str:
    name, rate = pair
    return f"{name} {rate.peak / 1e9:.3g} GFLOP/s, spread {rate.spread:.1%}"


def _link(link: LinkSpec) -> list[str]:
    lines = [
        f"bandwidth = {link.bandwidth:.4g}",
        f"latency_s = {link.latency_s:.4g}",
        f"efficiency = {link.efficiency:.4g}",
    ]
    if link.node_bandwidth is not None:
        lines.append(f"node_bandwidth = {link.node_bandwidth:.4g}")
    return lines
