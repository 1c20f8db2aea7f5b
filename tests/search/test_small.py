"""A small model is planned with what is loaded in little time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT

PLANNED = """
import json, sys
import autopar
from examples import mlp
step, args = mlp.build("tiny", abstract=True)
plan = autopar.parallelize(step, cluster=autopar.Cluster.load("dgx-a100")).plan(*args)
step, args = mlp.build("tiny", abstract=True, layers=16)  # for the eight devices of this process
autopar.parallelize(step).plan(*args)
print(json.dumps([plan.step_time, [m for m in ("networkx", "numba") if m in sys.modules]]))
"""


@pytest.mark.slow
def test_planning_a_small_model_loads_no_compiler_of_loops_and_no_graph_library() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "AUTOPAR_CACHE_DIR": "off"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", PLANNED], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    step_s, loaded = json.loads(done.stdout)
    assert step_s > 0
    assert loaded == []
