"""Figures of local devices that a machine keeps: who reads them, and for which devices."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, ClusterError
from autopar._compat.devices import FoundDevice, local_devices
from autopar._compat.files import CACHE_VARIABLE
from autopar.cluster.catalog import FIGURES_VARIABLE, kept_path
from autopar.cost.calibrated_file import MeasuredGroup, file_text
from autopar.cost.calibration import fit
from autopar.hooks import HOOKS
from tests.cost.test_calibration import FLOPS, HOW, samples

LIST = Cluster.load("local-cpu").groups[0]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of four devices of this process, which holds figures that were measured."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    path = kept_path(os.environ, local_devices(jax.devices()[:4]))
    assert path is not None
    path.parent.mkdir()
    group = dataclasses.replace(LIST, devices_per_node=4)
    path.write_text(file_text("here", [MeasuredGroup(group, fit(samples()), HOW)]), encoding="utf-8")
    return path


def flops_of(cluster: Cluster) -> float:
    return dict(cluster.groups[0].device.peak_flops)["f32"]


def test_local_devices_have_kept_figures_and_plans_say_so(kept: Path) -> None:
    cluster = Cluster.local(jax.devices()[:4])
    assert flops_of(cluster) == pytest.approx(FLOPS) and cluster.num_devices == 4
    assert "measured 20" in cluster.name and "measured 20" in str(cluster)
    plan = autopar.parallelize(lambda x: x @ x, cluster=cluster).plan(jnp.ones((8, 8)))
    assert cluster.name in str(plan)


def test_other_devices_and_the_list_have_those_of_the_file(kept: Path) -> None:
    for cluster in (Cluster.local(jax.devices()[:2]), Cluster.local(jax.devices()[:4], figures="list")):
        assert cluster.name == "local-cpu" and cluster.groups[0].device == LIST.device


def test_several_processes_have_those_of_the_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have its own, and they would plan differently."""
    two = tuple(FoundDevice("cpu", "cpu", None, process=n // 2) for n in range(4))
    monkeypatch.setattr("autopar.cluster.cluster.local_devices", lambda _: two)
    assert [g.device for g in Cluster.local().groups] == [LIST.device]


def test_a_file_that_is_none_is_a_warning(kept: Path) -> None:
    kept.write_text("name = ", encoding="utf-8")
    with pytest.warns(UserWarning, match="autopar calibrate writes it again"):
        assert Cluster.local(jax.devices()[:4]).name == "local-cpu"


def test_devices_are_measured_once_where_that_is_asked_for(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(devices: Any) -> Any:
        asked.append(devices)
        return dataclasses.replace(LIST, devices_per_node=2, measured="now")

    monkeypatch.setitem(HOOKS._loaders, "measure devices", lambda: measured)
    assert Cluster.local(jax.devices()[:2]).name == "local-cpu" and not asked
    assert Cluster.local(jax.devices()[:2], figures="measured").name == "local-cpu, measured now"
    monkeypatch.setenv(FIGURES_VARIABLE, "measured")
    assert Cluster.local(jax.devices()[:2]).name == "local-cpu, measured now" and len(asked) == 2
    assert flops_of(Cluster.local(jax.devices()[:4])) == pytest.approx(FLOPS) and len(asked) == 2


@pytest.mark.parametrize("devices", ["cpu", "other"])
def test_each_number_and_kind_of_devices_has_a_file(devices: str, tmp_path: Path) -> None:
    environment = {CACHE_VARIABLE: str(tmp_path)}
    one, two = ([FoundDevice("gpu", devices, None)] * n for n in (1, 2))
    assert kept_path(environment, one) != kept_path(environment, two)
    assert kept_path(environment, one) != kept_path(environment, [FoundDevice("gpu", "third", None)])
    assert kept_path({CACHE_VARIABLE: "off"}, one) is None


@pytest.mark.slow
def test_the_command_keeps_what_it_measures(tmp_path: Path) -> None:
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def ran(*arguments: str, **more: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], env=environment | more, check=True, capture_output=True, text=True
        ).stdout

    ran("-m", "autopar", "calibrate", "--cpu-devices", "2", "--quick", "-q")
    (file,) = (tmp_path / "calibrations").iterdir()
    assert file.name.startswith("cpu-2-")
    name = "import autopar; print(autopar.Cluster.local().name)"
    assert "measured 20" in ran("-c", name, JAX_NUM_CPU_DEVICES="2")
    assert ran("-c", name, JAX_NUM_CPU_DEVICES="3") == "local-cpu\n"
    ran("-c", name, JAX_NUM_CPU_DEVICES="3", AUTOPAR_FIGURES="measured")
    assert len(list(file.parent.iterdir())) == 2


def test_other_figures_are_an_error() -> None:
    with pytest.raises(ClusterError, match="no figures 'guessed'"):
        Cluster.local(figures="guessed")  # type: ignore[arg-type]
