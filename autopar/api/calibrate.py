"""`calibrate`: a cluster file of the devices at hand, measured."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar._compat.devices import jax_version, local_devices, machine_name
from autopar._compat.files import CACHE_VARIABLE, write_whole
from autopar.cluster import Cluster, NodeGroup
from autopar.cluster.catalog import kept_path
from autopar.cluster.file import parse
from autopar.cost.calibrated_file import Circumstances, MeasuredGroup, file_text
from autopar.cost.calibrated_kinds import fit_kinds
from autopar.cost.calibration import Calibration, Sample, fit
from autopar.cost.links import LinkSample, fit_network
from autopar.errors import ClusterError
from autopar.runtime.measuring import HERE, Effort, measure_devices
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.measured import MeasuredKind, measure_workers


@dataclass(frozen=True)
class Calibrated:
    """The measurements of `calibrate`.

    Args:
        samples: every measurement of devices.
        figures: what was fitted to them; of the first kind of devices where workers have several.
        text: the cluster file.
        links: every measurement of transfers between workers.
        groups: what was fitted to each kind of devices and its links.
    """

    samples: tuple[Sample, ...]
    figures: Calibration
    text: str
    links: tuple[LinkSample, ...] = ()
    groups: tuple[MeasuredGroup, ...] = ()

    def save(self, path: str) -> None:
        """Writes the cluster file, whole or not at all."""
        write_whole(path, self.text)


def calibrate(
    name: str = "calibrated",
    *,
    devices: Sequence[Any] | None = None,
    cluster: Cluster | None = None,
    effort: Effort | None = None,
    keep: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Measures products, convolutions, memory, launches and collectives of devices; fits a cluster file to them.

    With workers on Ray the links between them are measured too, by the transport of pipelines, and devices are those
    of one worker of each kind: this process needs none.

    Args:
        name: of the cluster.
        devices: jax devices of one kind; None takes all of this process.
        cluster: what `autopar.Cluster.ray` returned; its workers are measured instead of this process's devices.
        effort: sizes and repetitions.
        keep: whether this machine keeps the figures, for `Cluster.local`.
        progress: called with a line when a phase begins.

    Raises:
        ClusterError: the devices are of several kinds, or of one that no cluster file knows; the cluster is not of
            Ray, has fewer than two workers, or they do not start; ``keep`` where nothing is kept, or of Ray.
        WorkerLostError: a worker was lost while it measured.
    """
    effort = effort or Effort()
    if cluster is not None:
        if keep:
            raise ClusterError("keep= is for the devices of this process, not for workers", remedy="save the file")
        return _calibrate_workers(name, devices, cluster, effort, progress)
    measured_devices = list(jax.local_devices() if devices is None else devices)
    path = _kept_path(measured_devices) if keep else None
    group = Cluster.local(measured_devices, figures="list").groups[0]
    samples = measure_devices(measured_devices, effort, progress)
    named = machine_name(measured_devices[0].platform, measured_devices[0].device_kind)
    how = Circumstances(datetime.date.today(), named, jax_version(), effort.repeats)
    calibration = fit(samples)
    measured = MeasuredGroup(group, calibration, how, kinds=fit_kinds(samples, calibration))
    calibrated = _calibrated(name, samples, [measured])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibrated.save(str(path))
    return calibrated


def measured_group(devices: Sequence[Any] | None) -> NodeGroup:
    """The node of devices of this process, measured roughly, and kept where anything is."""
    measured_devices = list(jax.local_devices() if devices is None else devices)
    here = local_devices(measured_devices)
    calibrated = calibrate("here", devices=measured_devices, effort=HERE, keep=kept_path(os.environ, here) is not None)
    return parse(tomllib.loads(calibrated.text), "here")[1][0]


def _kept_path(devices: Sequence[Any]) -> Path:
    path = kept_path(os.environ, local_devices(devices))
    if path is None:
        raise ClusterError(f"{CACHE_VARIABLE} says that nothing is kept", remedy="save the file, and load it by path")
    return path


def _calibrate_workers(
    name: str, devices: Sequence[Any] | None, cluster: Cluster, effort: Effort, progress: Callable[[str], None]
) -> Calibrated:
    if devices is not None:
        raise ClusterError("devices= are of this process, and cluster= has its own", remedy="give one of them")
    if not isinstance(cluster, RayCluster):
        raise ClusterError(
            f"{cluster.name} has no workers to measure",
            cause="it was read from a file, or is of this process",
            remedy="give Cluster.ray(), or leave cluster= out to measure the devices of this process",
        )
    measured = measure_workers(cluster, effort, progress)
    groups = []
    for kind in measured.kinds:
        how = Circumstances(datetime.date.today(), kind.facts.name, kind.facts.versions, effort.repeats)
        network = fit_network(measured.links_of(kind))
        group = _unmeasured(cluster, kind)
        fitted = fit(kind.samples)
        kinds = fit_kinds(kind.samples, fitted)
        groups.append(MeasuredGroup(group, fitted, how, network, measured.text, measured.call_s, kinds))
    samples = tuple(s for kind in measured.kinds for s in kind.samples)
    return _calibrated(name, samples, groups, measured.links)


def _calibrated(
    name: str, samples: tuple[Sample, ...], groups: Sequence[MeasuredGroup], links: tuple[LinkSample, ...] = ()
) -> Calibrated:
    return Calibrated(samples, groups[0].calibration, file_text(name, groups), links, tuple(groups))


def _unmeasured(cluster: RayCluster, kind: MeasuredKind) -> NodeGroup:
    """The group of workers of one kind as it would be planned for without measuring."""
    group = cluster.groups[0]
    if kind.facts.device_kind not in group.device.jax_kinds:
        group = Cluster.local([kind.facts], figures="list").groups[0]
    limit = kind.facts.memory_bytes or group.device.memory_bytes
    device = dataclasses.replace(group.device, memory_bytes=min(group.device.memory_bytes, limit))
    return dataclasses.replace(group, count=len(kind.workers), devices_per_node=kind.facts.devices, device=device)
