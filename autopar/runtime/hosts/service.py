"""jax's coordination service in a process of its own: the death of process 0 does not take it from the others.

jax itself starts the service inside process 0, and its clients end their processes at once when it is gone.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import time

from autopar._compat.world import serve

#: Written by a process 0 that ends in order.
_BYE = b"bye"
#: Seconds that the service outlives a process 0 that ended in order; more than `linger_s` for one that did not.
_AFTER_BYE_S = 3.0
_LINGER_S = 10.0
_POLL_S = 0.2


def start_service(address: str, processes: int, limit_s: int, linger_s: float) -> subprocess.Popen[bytes]:
    """The service, started next to this process; it ends some time after this process does.

    Args:
        address: host and port where it listens.
        processes: how many will join.
        limit_s: seconds after which it takes a silent process for lost.
        linger_s: seconds in which the others see that this process is gone.
    """
    arguments = [address, processes, limit_s, linger_s + _LINGER_S, os.getpid()]
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    atexit.register(_say_bye, child)
    return child


def why_ended(child: subprocess.Popen[bytes]) -> str | None:
    """The last line that a service wrote which ended by itself; None where it has not ended."""
    if child.poll() is None:
        return None
    assert child.stderr is not None
    lines = child.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {child.returncode}"


def _say_bye(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    if getattr(sys, "last_value", None) is None and child.poll() is None:
        child.stdin.write(_BYE)
        child.stdin.flush()


def main() -> None:
    """Serves `jax.distributed` until some time after the process that started it is gone.

    Arguments of the command line: address, processes, seconds of silence, seconds to linger, id of that process.
    """
    address, processes, limit_s, linger_s, parent = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # who is told to end saves first, with the others
    service = serve(address, int(processes), int(limit_s))
    in_order = False
    while os.getppid() == int(parent):
        time.sleep(_POLL_S)
    if select.select([sys.stdin], [], [], 0)[0]:
        in_order = os.read(sys.stdin.fileno(), len(_BYE)) == _BYE
    time.sleep(_AFTER_BYE_S if in_order else float(linger_s))
    sys.stdout.flush()
    del service
    os._exit(0)


if __name__ == "__main__":
    main()
