"""Settings of all tests: eight virtual CPU devices, no plans on disk, hypothesis profiles, 64-bit floats on request.

The variables are set before anything imports jax, which reads them once. Worker processes of xdist import
this file too, and inherit the variables.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

_DEVICES = "--xla_force_host_platform_device_count"
_other_flags = re.sub(rf"{_DEVICES}=\S*", "", os.environ.get("XLA_FLAGS", "")).strip()
# Programs run once or twice here: LLVM's optimizations take a third of the suite's time and find no fault of autopar.
# AUTOPAR_TEST_XLA="" compiles as users do.
_fast = os.environ.get("AUTOPAR_TEST_XLA", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = f"{_other_flags} {_DEVICES}=8 {_fast}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["AUTOPAR_CACHE_DIR"] = "off"

# "ci" makes the same examples on every run, so that a change of the code is the only reason for a change of the
# result. "dev" looks for new ones: HYPOTHESIS_PROFILE=dev. Times on shared machines mean nothing: no deadline.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


#: Resident bytes of a test process from which on compiled programs of the tests so far are given back: a process of
#: many GB cannot fork where others run beside it, and Ray forks.
_MOST_RESIDENT = int(os.environ.get("AUTOPAR_TEST_RESIDENT", 3 << 30))


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_given_back() -> Iterator[None]:
    """Drops jax's caches after a file whose process has become large."""
    yield
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    if resident > _MOST_RESIDENT and "jax" in sys.modules:
        gc.collect()
        sys.modules["jax"].clear_caches()


@pytest.fixture
def x64() -> Iterator[None]:
    """Turns on 64-bit floats and integers of jax for one test.

    Under hypothesis write ``with jax.enable_x64(True):`` in the body instead, since a fixture covers all examples.
    """
    import jax  # the planner's tests run without it

    with jax.enable_x64(True):
        yield
