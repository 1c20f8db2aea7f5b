"""`calibrate`: a cluster file of the devices at hand, measured."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from autopar.cluster import Cluster
from autopar.cost.calibrated_file import Circumstances, file_text
from autopar.cost.calibrated_kinds import fit_kinds
from autopar.cost.calibration import Calibration, Sample, fit
from autopar.plan import write_whole
from autopar.runtime.measuring import Effort, measure_devices


@dataclass(frozen=True)
class Calibrated:
    """What `calibrate` measured.

    Args:
        samples: every measurement.
        figures: what was fitted to them.
        text: the cluster file.
    """

    samples: tuple[Sample, ...]
    figures: Calibration
    text: str

    def save(self, path: str) -> None:
        """Writes the cluster file, whole or not at all."""
        write_whole(path, self.text)


def calibrate(
    name: str = "calibrated",
    *,
    devices: Sequence[Any] | None = None,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Measures products, convolutions, memory, launches and collectives of devices; fits a cluster file to them.

    Args:
        name: of the cluster.
        devices: jax devices of one kind; None takes all of this process.
        effort: sizes and repetitions.
        progress: called with a line when a phase begins.

    Raises:
        ClusterError: the devices are of several kinds, or of one that no cluster file knows.
    """
    effort = effort or Effort()
    chosen = list(jax.local_devices() if devices is None else devices)
    group = Cluster.local(chosen).groups[0]
    samples = measure_devices(chosen, effort, progress)
    found = fit(samples)
    how = Circumstances(
        datetime.date.today(),
        processor() if chosen[0].platform == "cpu" else str(chosen[0].device_kind),
        f"jax {metadata.version('jax')}",
        effort.repeats,
    )
    return Calibrated(samples, found, file_text(name, group, found, how, fit_kinds(samples, found)))


def processor() -> str:
    """What the processor is called; the machine's architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.machine()
