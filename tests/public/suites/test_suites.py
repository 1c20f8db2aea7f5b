"""Tests of released packages with autopar in the place of `jax.jit`, a few minutes of each: a part of the rotation.

`python -m tests.public.suites` runs them whole.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.public.suites.__main__ import SUITES

MINUTES = 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.is_wheel])
def test_what_passes_under_jit_passes_under_autopar(name, tmp_path):
    options = ["--out", str(tmp_path), "--minutes", str(MINUTES), name]
    done = subprocess.run([sys.executable, "-m", "tests.public.suites", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.splitlines()[2].split("|")[2])
    assert passed > 0, done.stdout
