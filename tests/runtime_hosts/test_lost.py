"""Processes that end: the others say which one, and the supervisor starts all again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autopar
from autopar.runtime.hosts.supervise import AGAIN, SupervisedJob, supervise
from benchmarks.kills import train
from tests.runtime_hosts.launch import ROOT, free_port, run

KILLS = int(os.environ.get("AUTOPAR_TEST_KILLS", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "victim"), [("killed", 1), ("fails", 1), ("killed", 0), ("fails", 0)])
def test_the_others_end_with_a_typed_error(how: str, victim: int) -> None:
    options = {"how": how, "victim": victim, "initialize": victim == 0}
    ended = run("lose", **options, limit_s=100, environment={"AUTOPAR_HEARTBEAT_S": "3"})
    lost, other = ended[victim], ended[1 - victim]
    assert lost.code != 0, lost.text
    assert other.code == 82, other.text[-3000:]
    assert f"autopar.errors.base.ProcessLostError: process {victim} of 2" in other.text
    want = (
        "gave no sign of life for 3 s (AUTOPAR_HEARTBEAT_S)" if how == "killed" else "failed: ValueError: no more data"
    )
    assert want in other.text


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [1, 9])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_ends_in_a_step_ends_those_that_wait_for_it(victim: int, instructions: int) -> None:
    options = {"victim": victim, "instructions": instructions, "initialize": True, "devices": 2, "limit_s": 280}
    ended = run("lose_in_step", **options, environment={"AUTOPAR_HEARTBEAT_S": "5"})
    lost, other = ended[victim], ended[1 - victim]
    assert lost.code == -signal.SIGKILL and lost.result == other.result == "in the step", other.text[-3000:]
    assert other.code == 82, other.text[-3000:]
    assert f"autopar.errors.base.ProcessLostError: process {victim} of 2 gave no sign of life for 5 s" in other.text


@pytest.mark.slow
def test_a_port_that_is_taken_is_a_typed_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (alone,) = run("alone", 1, join_s=60, coordinator=f"127.0.0.1:{taken.getsockname()[1]}", limit_s=60)
    assert alone.result == ["ClusterError", True], alone.text


@pytest.mark.slow
def test_a_process_that_never_comes_is_a_typed_error() -> None:
    (alone,) = run("alone", 1, join_s=2, coordinator=f"127.0.0.1:{free_port()}", limit_s=60)
    assert alone.result == ["ProcessLostError", True], alone.text


def test_the_supervisor_starts_all_again_until_all_end_in_order(tmp_path: Path) -> None:
    # Of three processes the last ends at once the first two times; with less each time, down to two.
    script = (
        "import os, sys, time, pathlib\n"
        "n, p = int(os.environ['AUTOPAR_PROCESSES']), int(os.environ['AUTOPAR_PROCESS'])\n"
        "pathlib.Path(sys.argv[1], f'{n}-{p}').touch()\n"
        "sys.exit(0 if n == 2 else 3 if p == 2 else time.sleep(60))\n"
    )
    said: list[str] = []
    job = SupervisedJob((sys.executable, "-c", script, str(tmp_path)), 3, 2, 3, heartbeat_s=0.5, grace_s=0.5)
    assert supervise(job, said.append) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2-0", "2-1", "3-0", "3-1", "3-2"]
    assert "process 2 ended with exit code 3" in said and "starting 2 processes again (1 of 3)" in said
    assert said.count("process 0 is ended: it waited for one that is gone") == 1


def is_there(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes there are")
def test_what_a_killed_supervisor_started_ends_with_it() -> None:
    """SIGKILL leaves it no time to end anything; children of what it started end too."""
    program = (
        "from autopar.runtime.hosts.supervise import SupervisedJob, supervise\n"
        "script = 'sleep 300 & echo $! $$; wait'\n"
        "supervise(SupervisedJob(('sh', '-c', script), 2, 2, 0, 60.0), lambda text: None)\n"
    )
    folder = Path(autopar.__file__).parents[1]  # the copy that is tested, which may lie elsewhere than the tests
    supervisor = subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout as lines:
        pids = [int(pid) for _ in range(2) for pid in lines.readline().split()]
        assert len(pids) == 4 and all(map(is_there, pids))
        supervisor.kill()
        supervisor.wait()
    for _ in range(200):
        if not any(map(is_there, pids)):
            break
        time.sleep(0.1)
    assert not any(map(is_there, pids))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes there are")
def test_a_supervisor_killed_by_the_first_act_of_a_process_leaves_nothing(tmp_path: Path) -> None:
    """No moment lies between the start of a process and its end with the supervisor."""
    program = (
        "import sys\n"
        "from autopar.runtime.hosts.supervise import SupervisedJob, supervise\n"
        "script = 'echo $$ > %s/pid; kill -9 $PPID; sleep 300' % sys.argv[1]\n"
        "supervise(SupervisedJob(('sh', '-c', script), 1, 1, 0, 60.0), lambda text: None)\n"
    )
    folder = Path(autopar.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=folder, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    assert any(not is_there(pid) or time.sleep(0.1) for _ in range(200))


def test_the_supervisor_gives_up(tmp_path: Path) -> None:
    said: list[str] = []
    job = SupervisedJob((sys.executable, "-c", "raise SystemExit(5)"), 1, 1, 2, heartbeat_s=1.0)
    assert supervise(job, said.append) == 5
    assert said[-1] == "ended with 5 after 2 restarts"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_notice_to_end_saves_first(tmp_path: Path, victim: int) -> None:
    job_options = "--processes 2 --cpu-devices 2 --restarts 0"
    script = f"{sys.executable} -m examples.train_hosts {tmp_path} --steps 500 --every 1000 --pause 0.1"
    command = f"{sys.executable} -m autopar run {job_options} -- {script}".split()
    pids, steps, lines = {}, [], []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE_DIR": "off"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if found := re.match(r"autopar run: process (\d): pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
            elif found := re.match(r"step (\d+):", line):
                steps.append(int(found[1]))
                if len(steps) == 3:
                    os.kill(pids[victim], signal.SIGTERM)
    assert job.returncode == AGAIN, "".join(lines)
    # No other checkpoint was due: that of the last step is the one that the notice asked for.
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(steps[-1])]
    assert len(steps) < 500 and "told to end: saved\n" in lines


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_kills_leave_the_parameters_equal_to_the_bit(tmp_path: Path) -> None:
    steps = 10 + 4 * KILLS
    killed = train(tmp_path / "killed", steps, KILLS)
    assert killed.code == 0, killed.text[-4000:]
    assert len(killed.given) == KILLS and killed.alive == ()
    plain = train(tmp_path / "plain", steps, 0)
    assert killed.result == plain.result and plain.result["processes"] == 2
    assert len(killed.checkpoints) == 2 and all(n.isdigit() for n in killed.checkpoints), killed.checkpoints
