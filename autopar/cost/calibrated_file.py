"""A cluster file of figures that were measured: TOML with the date and the spread in comments."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import COEFFICIENTS, ConvolutionRate, Curve, Device, LinkSpec, MeasuredCollective, NodeGroup
from autopar.cost.calibrated_kinds import Kinds
from autopar.cost.calibration import Calibration, Rate
from autopar.cost.constants import load_constants
from autopar.cost.links import Network


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of a measurement.

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
        calibration: what was measured of the devices.
        how: the circumstances.
        network: what connects the nodes; None where it was not measured.
        between: the circumstances of that, as "2 workers on 2 machines, over sockets".
        driver_s: seconds that a call of all workers by the driver takes.
        kinds: what was measured of kinds of work.
    """

    group: NodeGroup
    calibration: Calibration
    how: Circumstances
    network: Network | None = None
    between: str = ""
    driver_s: float = 0.0
    kinds: Kinds = field(default_factory=Kinds)


def file_text(name: str, groups: Sequence[MeasuredGroup]) -> str:
    """A cluster file.

    Args:
        name: of the cluster.
        groups: its groups.
    """
    return "\n".join([f'name = "{name}"', *(line for g in groups for line in ("", *_group(g)))]) + "\n"


def _group(measured: MeasuredGroup) -> list[str]:
    group, fitted, how = measured.group, measured.calibration, measured.how
    d = group.device
    label = "CPU" if "cpu" in d.jax_kinds else d.kind
    called = ", ".join(f'"{k}"' for k in d.jax_kinds)
    memory, peaks, share = _rates(d, fitted)
    lines = [
        f"# {group.devices_per_node} x {label}, measured by `autopar calibrate` on {how.date.isoformat()}:",
        f"# {how.machine}, {how.versions}. Medians of {how.repeats} repetitions that go round all programs; the spread",
        "# is the distance of the quartiles over the median. Efficiencies are [FLOPs or bytes of an operator, share].",
        "[[groups]]",
        f"count = {group.count}",
        f"devices_per_node = {group.devices_per_node}",
        f"measured = {json.dumps(f'{how.date.isoformat()} on {how.machine}, {how.versions}')}",
        "",
        "[groups.device]",
        f'kind = "{label}"',
        f"jax_kinds = [{called}]",
        f"memory_bytes = {d.memory_bytes}",
        f"# Elementwise operators and sums, all devices at once, read and written; spread {fitted.memory.spread:.1%}.",
        f"memory_bandwidth = {memory.peak:.4g}",
        f"memory_efficiency = {_curve(memory.efficiency)}",
        "# Matrix products, all devices at once: " + "; ".join(map(_product, fitted.products)) + ".",
        "peak_flops = { " + ", ".join(f"{k} = {peak:.4g}" for k, peak in peaks.items()) + " }",
        f"compute_efficiency = {_curve(share)}",
        f"# Chains of tiny products; spread {fitted.chain_spread:.1%}. "
        f"A call of a program costs {fitted.call_s:.2g} s.",
        f"launch_s = {fitted.launch_s:.4g}",
        *_kinds(measured.kinds),
        "",
        "[groups.intra]",
    ]
    if fitted.link is None:
        lines += ["# One device: not measured, taken from the file that knows such devices.", *_link(group.intra)]
    else:
        lines += [
            f"# Fitted to collectives: error {fitted.link_error:.1%}, spread {fitted.link_spread:.1%}.",
            f"bandwidth = {fitted.link.bandwidth:.4g}",
            f"latency_s = {fitted.link.latency_s:.4g}",
        ]
    if fitted.collectives:
        lines += ["# What they took, all groups of so many devices at once: [bytes of the full tensor, seconds]."]
        lines += ["collectives = [", *(f"    {_collective(m)}," for m in fitted.collectives), "]"]
    if fitted.refill is not None:
        lines += [
            "# What small all-reduces take longer between products of matrices of so many bytes than in a row.",
            f"refill_bandwidth = {fitted.refill.bandwidth:.4g}",
            f"refill_bytes = {fitted.refill.bytes:.9g}",
        ]
    return [*lines, "", "[groups.inter]", *_inter(measured)]


def _rates(device: Device, fitted: Calibration) -> tuple[Rate, dict[str, float], Curve]:
    """Memory, peaks by dtype, and the share of these that is reached by FLOPs.

    Of accelerators the shares are constant, for kernels by size have a model of their own (`autopar.cost.kernels`),
    which takes what large copies and products reach. Peaks of dtypes that were not measured are those of the file that
    knows the device.

    Args:
        device: as that file knows it.
        fitted: what was measured.
    """
    if "cpu" in device.jax_kinds:
        peaks = {name: rate.peak for name, rate in fitted.products}
        return fitted.memory, peaks, dict(fitted.products)["f32"].efficiency
    listed, rates = dict(device.peak_flops), dict(fitted.products)
    name = next(n for n in ("bf16", "f32") if n in rates)
    share = min(1.0, rates[name].peak / listed.get(name, rates[name].peak))
    peaks = listed | {n: rate.peak / share for n, rate in rates.items()}
    reached = load_constants().kernels.memory_share
    memory = replace(fitted.memory, peak=fitted.memory.peak / reached, efficiency=Curve.constant(reached))
    return memory, peaks, Curve.constant(share)


def _inter(measured: MeasuredGroup) -> list[str]:
    network, group = measured.network, measured.group
    if network is None:
        unknown = group.inter if isinstance(group.inter, LinkSpec) else group.intra
        return ["# Not measured: taken from the file that knows such devices.", *_link(unknown)]
    lines = [
        f"# Fitted to transfers between {measured.between}:",
        f"# error {network.error:.1%}, spread {network.spread:.1%}. "
        f"A call by the driver takes {measured.driver_s:.2g} s.",
    ]
    if network.chain_share is not None:
        lines.append(
            f"# Transfers that follow each other take {network.chain_share:.2f} of what these figures add up to."
        )
    lines += [f"bandwidth = {network.link.bandwidth:.4g}", f"latency_s = {network.link.latency_s:.4g}"]
    if network.node_bandwidth is not None:
        lines.append(f"node_bandwidth = {network.node_bandwidth:.4g}")
    return lines


def _convolution(rate: ConvolutionRate) -> list[str]:
    named = [f"{name} = {each_s:.3g}" for name, each_s in zip(COEFFICIENTS, rate.seconds, strict=True) if each_s]
    form = [f"form = {json.dumps(rate.form)}"] if rate.form != "windows" else []
    return [f"kind = {json.dumps(rate.kind)}", *form, f"spatial_dims = {rate.spatial_dims}", *named]


def _kinds(kinds: Kinds) -> list[str]:
    spreads = {k: f"spread {s:.1%}." for k, s in kinds.spreads}
    lines = []
    if kinds.convolutions:
        lines += [
            "# Convolutions: seconds of a multiplication, of an element of windows, kernels and results, of elements",
            "# of windows that are packed one by one, of places of windows with few features;",
            f"# error {kinds.convolution_error:.1%}, {spreads['convolution']}",
            "convolutions = [",
        ]
        lines += [f"    {{ {', '.join(_convolution(rate))} }}," for rate in kinds.convolutions]
        lines += ["]"]
    if kinds.reorder:
        lines += ["# Operands copied in another order, [bytes between neighbours, share]; " + spreads["reorder"]]
        lines += [f"reorder_efficiency = {_curve(kinds.reorder, 5)}"]
    if kinds.reduction:
        lines += ["# Sums, [bytes side by side that go into one result, share]; " + spreads["reduction"]]
        lines += [f"reduction_efficiency = {_curve(kinds.reduction, 5)}"]
    if kinds.first_touch_bandwidth:
        lines += ["# Writing new memory, beyond writing it again; " + spreads["first touch"]]
        lines += [f"first_touch_bandwidth = {kinds.first_touch_bandwidth:.4g}"]
    if kinds.function_s:
        lines += ["# Seconds an element beyond a multiplication and an addition; " + spreads["function"]]
        lines += ["function_s = { " + ", ".join(f"{name} = {s:.3g}" for name, s in kinds.function_s) + " }"]
    return lines


def _curve(curve: Curve, digits: int = 3) -> str:
    return "[" + ", ".join(f"[{x:.4g}, {y:.{digits}f}]" for x, y in curve.points) + "]"


def _collective(measured: MeasuredCollective) -> str:
    seconds = ", ".join(f"[{b:.9g}, {s:.4g}]" for b, s in measured.seconds)
    return f'{{ kind = "{measured.kind}", devices = {measured.devices}, seconds = [{seconds}] }}'


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
