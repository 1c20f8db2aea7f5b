"""Training while workers are killed and come and go, for a quarter of an hour, next to the same left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_training_under_kills_is_training_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "soak", "--minutes", "15"], capture_output=True, text=True, timeout=7000
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
