"""Plans of small models, kept in ``tests/golden``: a change of any is read in review.

AUTOPAR_UPDATE_GOLDEN=1 python -m pytest tests/search/test_golden.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autopar import Cluster, parallelize
from autopar.plan import Plan
from examples import gpt, mlp, moe
from tests.search.problems import toy
from tests.versions import tolerance

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BUILDS = {"gpt": gpt.build, "mlp": mlp.build, "moe": moe.build}
# Differentiating tanh makes fewer operators in newer jax (one_minus_square is one), which the time of a step shows.
TIME_TOLERANCE = {"gpt": 0.005}
CLUSTERS = {"dgx-a100": (lambda: Cluster.load("dgx-a100", nodes=1), None), "toy": (lambda: toy(4), (4,))}


def summary(plan: Plan) -> dict[str, Any]:
    """What a person would check: where the arguments lie, what is sent, how long a step takes."""
    inputs: dict[str, list[str]] = {}
    for i in plan.content.inputs:
        inputs.setdefault(i.layout, []).append(i.path)
    return {
        "mesh": plan.stages[0].mesh_shape,
        "step_time_s": float(f"{plan.step_time:.6g}"),
        "communication": sorted(f"{c.count:g} {c.kind} of {c.bytes} bytes over {c.axis}" for c in plan.communication),
        "inputs": dict(sorted(inputs.items())),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", BUILDS)
def test_plan(name, cluster):
    fn, args = BUILDS[name](abstract=True)
    make, mesh_shape = CLUSTERS[cluster]
    found = summary(parallelize(fn, cluster=make(), mesh_shape=mesh_shape, num_stages=1).plan(*args))
    path = GOLDEN / f"search_{name}_{cluster}.json"
    if os.environ.get("AUTOPAR_UPDATE_GOLDEN") == "1":
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["step_time_s"] = pytest.approx(kept["step_time_s"], rel=TIME_TOLERANCE.get(name, 1e-9) + tolerance(0.005))
    assert found == kept, "if the change is meant: AUTOPAR_UPDATE_GOLDEN=1, and review the difference"
