"""HiGHS prints nothing on the standard output of the user's process, whatever its version prints by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.solver import pulp_highs

#: A process in which the first solver of HiGHS prints a banner when it is made, as that of version 1.16 does, and
#: another thread writes to the file descriptor at that time.
SCRIPT = """
import os, threading
import highspy

class Printing(highspy.Highs):
    made = []

    def __init__(self):
        super().__init__()
        if not self.made:
            other = threading.Thread(target=os.write, args=(1, b"of another thread\\n"))
            other.start()
            other.join()
            os.write(1, b"Running HiGHS 1.16.0 (git hash: f3f113d): Copyright (c) 2026 under MIT licence terms\\n")
            os.write(1, b"Includes third-party software components, see THIRD_PARTY_NOTICES.md for full details\\n")
        self.made.append(self)

highspy.Highs = Printing

from autopar.solver.highs import HighsSolver
from tests.solver.problems import random_problem

problems, solutions = [random_problem(seed) for seed in range(4)], []
threads = [threading.Thread(target=lambda p=p: solutions.append(HighsSolver().solve(p))) for p in problems]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(solutions), len(Printing.made) > 1, flush=True)
"""


def test_a_fresh_process_prints_nothing_of_highs():
    root = Path(pulp_highs.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert (done.stdout, done.returncode) == (b"of another thread\n4 True\n", 0), done.stderr


def test_lines_of_others_stay_on_standard_output(capfd):
    with pytest.raises(ZeroDivisionError), pulp_highs._without_banner():
        os.write(1, b"one\nRunning HiGHS 2\ntwo")
        raise ZeroDivisionError
    os.write(1, b" three")
    assert capfd.readouterr().out == "one\ntwo three"
