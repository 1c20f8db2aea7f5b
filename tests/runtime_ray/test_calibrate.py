"""Workers on Ray, measured: processes of their own, over connections of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import autopar
from autopar.api import calibrate as api_calibrate
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.cluster.ray_options import RayOptions
from autopar.errors import WorkerLostError
from autopar.runtime.measuring import QUICK
from autopar.runtime.ray import start
from autopar.runtime.ray.cluster import RayCluster
from tests.runtime_ray.pipelines import thread_cluster
from tests.runtime_ray.test_exchange import LEAST as SHORT

LEAST = replace(SHORT, transfers=QUICK.transfers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with Cluster.ray(workers=2, devices_per_worker=2, deadline_s=60) as made:
        yield made


def test_links_between_workers_are_in_the_file(cluster: RayCluster, tmp_path: Path) -> None:
    """A worker that is killed meanwhile is named, and other workers are measured after that."""

    def kill(text: str) -> None:
        if "round 2" in text:
            os.kill(cluster.processes[1], signal.SIGKILL)

    with pytest.raises(WorkerLostError, match="worker 1 was lost while transfers between workers") as caught:
        autopar.calibrate(cluster=cluster, effort=LEAST, progress=kill)
    assert caught.value.worker == 1

    found = autopar.calibrate("mine", cluster=cluster, effort=LEAST)
    measured = {(s.how, s.workers, s.bytes, s.lanes) for s in found.links}
    assert measured == {
        *(("bounce", (0, 1), size, lanes) for size in LEAST.transfers for lanes in (1, 2)),
        *(("chain", (0, 1), size, 2) for size in LEAST.transfers),
    }
    assert all(len(s.seconds) == LEAST.repeats and min(s.seconds) > 0 for s in found.links)
    kinds = {"convolution", "reorder", "reduction", "function", "first touch"}
    assert {s.what for s in found.samples} == kinds | {"call", "chain", "product", "copy", "collective", "between"}

    file = tmp_path / "mine.toml"
    found.save(str(file))
    (group,) = Cluster.load(file).groups
    (made,) = found.groups
    assert (group.count, group.devices_per_node) == (2, 2)
    assert made.network is not None and group.device.reorder_efficiency is not None
    assert group.inter.bandwidth == pytest.approx(made.network.link.bandwidth, rel=1e-3)
    assert "2 workers on 1 machine, over sockets" in found.text
    # The same workers, to be planned for with what was measured.
    with Cluster.ray(workers=2, devices_per_worker=2, like=str(file)) as again:
        assert again.groups[0].inter == group.inter
        assert again.groups[0].device.launch_s == group.device.launch_s


def test_the_command_takes_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it asks Ray for; the workers are threads, which are measured once."""
    asked: list[tuple[str | None, RayOptions]] = []

    def connect(address: str | None, options: RayOptions) -> RayCluster:
        asked.append((address, options))
        return thread_cluster(options.workers or 2, options.sizes[0] or 1, deadline_s=60)

    monkeypatch.setattr(start, "ray_cluster", connect)
    monkeypatch.setattr("autopar.runtime.measuring.QUICK", LEAST)
    measure, kept = api_calibrate.calibrate, []

    def calibrate(*args: Any, **known: Any) -> Any:
        kept.extend([] if kept else [measure(*args, **known)])
        return kept[0]

    monkeypatch.setattr(api_calibrate, "calibrate", calibrate)
    file = tmp_path / "mine.toml"
    common = ["calibrate", "--quick", "-q"]
    for more in (["-o", str(file), "--ray", "head:6379", "--workers", "3"], ["--ray", "-o", str(file)]):
        done = CliRunner().invoke(main, [*common, *more])
        assert done.exit_code == 0, done.output
        assert done.stdout == file.read_text(encoding="utf-8")
    assert Cluster.load(file).name == "mine" and Cluster.load(file).num_nodes == 3
    assert asked == [("head:6379", RayOptions(workers=3)), (None, RayOptions())]
    before = dict(os.environ)
    done = CliRunner().invoke(main, [*common, "--ray", "--cpu-devices", "2", "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert asked[-1] == (None, RayOptions(devices_per_worker=2, devices="cpu"))
    assert dict(os.environ) == before  # the variables of virtual devices are for this process's own
    wrong = CliRunner().invoke(main, ["calibrate", "--workers", "2", "-o", str(file)])
    assert wrong.exit_code == 2 and "--workers is for --ray" in wrong.output


@pytest.mark.slow
def test_the_command_measures_workers_on_ray(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    command = [sys.executable, "-m", "autopar", "calibrate", "--quick", "--ray", "--cpu-devices", "2"]
    done = subprocess.run([*command, "-o", str(file)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(file)
    assert (cluster.name, cluster.num_nodes, cluster.num_devices) == ("mine", 2, 4)
    assert done.stdout == file.read_text(encoding="utf-8")
    assert "Fitted to transfers between 2 workers on 1 machine, over sockets" in done.stdout


@pytest.mark.slow
def test_measuring_this_process_loads_no_ray() -> None:
    program = (
        "import sys, autopar\n"
        "from tests.runtime_ray.test_exchange import LEAST\n"
        "autopar.calibrate(effort=LEAST)\n"
        "assert 'ray' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
