"""The example for KubeRay: the manifest holds together, and what it runs saves when it is asked to end."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from autopar.runtime.ray.machine import GRACE_S, GROUP_MARK

MANIFEST = Path(__file__).parents[2] / "docs" / "kuberay.yaml"


def pods(spec: Any) -> list[Any]:
    return [g["template"]["spec"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_manifest_holds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields are those of the RayJob; the command is one that the script takes; volumes, ports and pods agree."""
    job, claim = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"]["mode"] == "token"
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52)  # the first with tokens
    python, flag, module, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag) == ("python", "-m")
    asked = parsed(module, arguments, monkeypatch)
    (workers,) = spec["workerGroupSpecs"]
    assert asked["workers"] == workers["replicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert asked["devices"] == int(container["resources"]["limits"]["cpu"])
    head = spec["headGroupSpec"]["template"]
    assert asked["metrics"] in [p["containerPort"] for p in head["spec"]["containers"][0]["ports"]]
    assert head["metadata"]["annotations"]["prometheus.io/port"] == str(asked["metrics"])
    for pod in pods(spec):
        assert pod["terminationGracePeriodSeconds"] > GRACE_S
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == asked["folder"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert len({pod["containers"][0]["image"] for pod in pods(spec)}) == 1


def parsed(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the script makes of its arguments; nothing is run."""

    class Stop(Exception):
        pass

    found: dict[str, Any] = {}
    script = importlib.import_module(module)

    def stop(folder: str, **options: Any) -> None:
        raise Stop

    monkeypatch.setattr(script.autopar, "Checkpoints", stop)
    parse = script.argparse.ArgumentParser.parse_args

    def remember(self: Any) -> Any:
        found.update(vars(made := parse(self, arguments)))
        return made

    monkeypatch.setattr(script.argparse.ArgumentParser, "parse_args", remember)
    with pytest.raises(Stop):
        script.main()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("who", ["driver", "worker"])
def test_sigterm_saves_and_the_next_run_goes_on(tmp_path: Path, who: str) -> None:
    """To the driver or to a worker: a checkpoint of the last step, status 0, nobody left, no trace of an abort."""
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": "/tmp"}
    command = [sys.executable, "-m", "examples.train_ray", str(tmp_path), "--devices", "1", "--pause", "0.2"]
    with subprocess.Popen(
        [*command, "--every", "5"], env={**hidden, **paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "begins at step 0\n"
        assert run.stdout.readline().startswith("step 4: loss")
        started = psutil.Process(run.pid).children(recursive=True)
        workers = [p for p in started if "ray::_Actor" in " ".join(p.cmdline()) or GROUP_MARK in p.environ()]
        assert len(workers) == 2
        (run if who == "driver" else workers[0]).send_signal(signal.SIGTERM)
        out, told = run.communicate(timeout=120)
    assert run.returncode == 0, told
    assert "SIGTERM received" not in told
    last = int(out.splitlines()[-1].removeprefix("step ").partition(":")[0])
    until = time.monotonic() + 30
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in started)
    again = subprocess.run(
        [*command[:-1], "0", "--steps", str(last + 3)], env={**hidden, **paths}, capture_output=True, text=True
    )
    assert again.stdout.startswith(f"begins at step {last + 1}\n"), again.stderr
