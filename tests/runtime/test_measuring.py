"""Measuring the devices at hand: everything that a calibration needs comes back, and the command writes a cluster."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import pytest

import autopar
from autopar import Cluster
from autopar.runtime.measuring import Effort, clock_of

LEAST = Effort(
    products=(16, 64),
    copies=(1 << 12, 1 << 14),
    collectives=(1 << 10, 1 << 14),
    least_s=1e-5,
    repeats=2,
    images=(32,),
    strides=(128,),
    runs_bytes=(64,),
    summed_bytes=1 << 16,
    elements=1 << 10,
    first_touch=1 << 20,
)
KINDS = {"convolution", "reorder", "reduction", "function", "first touch"}


def test_cpu_seconds_are_counted_of_devices_that_keep_all_cores_busy() -> None:
    assert clock_of("cpu", 2, 4) is clock_of("gpu", 8, 4) is time.perf_counter
    clock = clock_of("cpu", 8, 4)
    began_s, before_s = clock(), time.process_time()
    while time.process_time() - before_s < 0.02:
        pass
    took_s = clock() - began_s
    assert 0.005 <= took_s <= (time.process_time() - 4 * began_s) / 4


def test_one_device_and_several() -> None:
    found = autopar.calibrate("here", devices=jax.devices()[:1], effort=LEAST)
    assert {s.what for s in found.samples} == {"call", "chain", "product", "copy"} | KINDS
    assert all(len(s.seconds) == LEAST.repeats and min(s.seconds) > 0 and s.runs >= 1 for s in found.samples)
    assert found.figures.link is None and "measured by" in found.text
    device = Cluster.from_dict(tomllib.loads(found.text)).groups[0].device
    assert device.reorder_efficiency is not None and device.reduction_efficiency is not None
    assert device.convolution_efficiency is not None and device.kernel_gradient_efficiency is not None
    assert {s.name for s in found.samples if s.what == "function"} >= {"", "exp", "tanh", "log", "erf", "sin"}


@pytest.mark.slow
def test_the_command_measures_virtual_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    command = [sys.executable, "-m", "autopar.cli", "calibrate", "--quick", "--cpu-devices", "4", "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(file)
    assert (cluster.name, cluster.num_devices) == ("mine", 4)
    assert done.stdout == file.read_text(encoding="utf-8")
    assert "Fitted to collectives" in done.stdout
