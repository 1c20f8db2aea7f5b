"""Two processes of one script train on this machine; one is killed on the way, and all go on from a checkpoint.

Each process has a stage of a pipeline and carries out its instruction list.

python -m examples.demo_hosts
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 12


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, killed = Path(folder, "plain"), Path(folder, "killed")
        print(f"Two processes of four CPU devices, each with a stage of a pipeline, {STEPS} steps:")
        follow(plain, kill_at=None)
        print("\nThe same again; process 1 is killed after step 5:")
        follow(killed, kill_at=5)
        results = [json.loads((path / "result.json").read_text()) for path in (plain, killed)]
        print("\nparameters at the end:", "equal to the bit" if results[0] == results[1] else "they differ")
        sys.exit(results[0] != results[1])


def follow(folder: Path, kill_at: int | None) -> None:
    """Runs the script under the supervisor and shows what it says.

    Args:
        folder: of its checkpoints.
        kill_at: step after which process 1 is killed; None kills none.
    """
    folder.mkdir()
    command = [
        sys.executable, "-m", "autopar", "run", "--processes", "2", "--cpu-devices", "4", "--heartbeat", "5", "--",
        sys.executable, "-m", "examples.train_hosts", str(folder), "--steps", str(STEPS), "--stages", "2",
    ]  # fmt: skip
    pid, pending = 0, kill_at
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith(("autopar run", "step", "2 processes")) or "ProcessLostError" in line:
                print("  " + line.rstrip(), flush=True)
            if found := re.match(r"autopar run: process 1: pid (\d+)", line):
                pid = int(found[1])
            if pending is not None and line.startswith(f"step {pending}:"):
                os.kill(pid, signal.SIGKILL)
                pending = None
        if started.wait() != 0:
            sys.exit(f"the script ended with {started.returncode}")
    finally:
        started.terminate()
        started.wait()
        if started.stdout is not None:
            started.stdout.close()


if __name__ == "__main__":
    main()
