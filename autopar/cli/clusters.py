"""``autopar clusters``."""

from __future__ import annotations

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import print_json, print_section
from autopar.cluster import Cluster, LinkSpec, NodeGroup, available
from autopar.plan.text import bytes_text
from autopar.report.sections import Section


@click.command(cls=Command, name="clusters")
@options.format_option("text", "json")
def command(form: str) -> None:
    """List the clusters that come with autopar.

    A name goes to --cluster, with --nodes for another number of nodes. Bandwidths are a device's, in one direction;
    peaks are for dense bf16 (f32 where a device has no bf16).
    """
    loaded = [Cluster.load(name) for name in available()]
    if form == "json":
        print_json([{"num_devices": c.num_devices, **c.to_dict()} for c in loaded])
        return
    header = ("name", "devices", "memory", "peak", "inside a node", "between nodes")
    print_section(Section("clusters", header, tuple(_row(c) for c in loaded)))


def _row(cluster: Cluster) -> tuple[str, ...]:
    groups = cluster.groups
    return (
        cluster.name,
        " + ".join(f"{g.count} x {g.devices_per_node} {g.device.kind}" for g in groups),
        " + ".join(bytes_text(g.device.memory_bytes) for g in groups),
        " + ".join(_peak(g) for g in groups),
        " + ".join(_link(g.intra) for g in groups),
        " + ".join("as inside" if g.inter == "intra" else _link(g.inter) for g in groups),
    )


def _peak(group: NodeGroup) -> str:
    dtypes = dict(group.device.peak_flops)
    dtype = "bf16" if "bf16" in dtypes else "f32"
    rate, unit = dtypes[dtype] / 1e12, "TFLOP/s"
    if rate < 1:
        rate, unit = 1000 * rate, "GFLOP/s"
    return f"{rate:,.0f} {unit} {dtype}" if rate >= 100 else f"{rate:.3g} {unit} {dtype}"


def _link(link: LinkSpec) -> str:
    dims = f" x {link.torus_dims}D" if link.torus_dims > 1 else ""
    return f"{bytes_text(link.bandwidth)}/s{dims}"
