"""What `jax.jit` does for its users, decorated functions do too: types, text, early errors."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar import AutoparError, ClusterError, PlanMismatchError
from autopar.search import strategies
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same

ROOT = Path(__file__).parent.parent.parent

USER_CODE = """
import autopar, jax

@autopar.parallelize
def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], float]:
    return state, 1.0

@autopar.parallelize(cluster="dgx-a100", num_microbatches=2)
def other(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x * scale

def use(x: jax.Array) -> None:
    state, loss = step({}, x)
    reveal_type(loss)
    reveal_type(other(x, scale=2.0))
    step(x)
    other(x, scal=1.0)
    autopar.parallelize(num_microbatch=2)
"""


@pytest.mark.slow
def test_type_checkers_see_the_function(tmp_path):
    (tmp_path / "user.py").write_text(USER_CODE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "user.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("user.py")]
    text = done.stdout
    assert 'Revealed type is "builtins.float"' in text or 'Revealed type is "float"' in text, text
    assert "jax._src.basearray.Array" in text or '"jax.Array"' in text or "jax.Array" in text, text
    errors = [line for line in lines if "error:" in line or "error" in line.split(":")[0]]
    assert len([n for n in ("[call-arg]", "[arg-type]", "[call-overload]") if n in text]) >= 2, text
    assert len(errors) >= 3, text


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright, which brings node, is not installed")
def test_pyright_sees_the_function(tmp_path):
    (tmp_path / "user.py").write_text(USER_CODE, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}), encoding="utf-8")
    done = subprocess.run(
        ["pyright", "--pythonpath", sys.executable, "--outputjson", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    by_line = {}
    for entry in json.loads(done.stdout)["generalDiagnostics"]:
        by_line[USER_CODE.splitlines()[entry["range"]["start"]["line"]].strip()] = entry["message"]
    assert by_line.pop("reveal_type(loss)") == 'Type of "loss" is "float"'
    assert by_line.pop("reveal_type(other(x, scale=2.0))").endswith('is "Array"')
    assert 'Argument missing for parameter "x"' in by_line.pop("step(x)")
    assert 'No parameter named "scal"' in by_line.pop("other(x, scal=1.0)")
    assert "No overloads" in by_line.pop("autopar.parallelize(num_microbatch=2)")
    assert not by_line


def test_repr_says_name_cluster_and_signatures():
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    assert "sgd" in repr(step) and CLUSTER.name in repr(step) and "not planned yet" in repr(step)
    step.plan(params(), batch())
    assert "data['x'] f32[16,16]" in repr(step) and "1 stage," in repr(step)


def test_a_cluster_by_name_and_a_plan_by_path(tmp_path):
    plan = autopar.parallelize(sgd, cluster="dgx-a100").plan(params(), batch())
    assert plan.content.cluster_name == str(autopar.Cluster.load("dgx-a100"))
    path = tmp_path / "plan.json"
    autopar.parallelize(sgd, cluster=CLUSTER).plan(params(), batch()).save(path)
    for given in (path, str(path)):
        step = autopar.parallelize(sgd, plan=given)
        assert_trees_same(step(params(), batch()), sgd(params(), batch()))
    with pytest.raises(ClusterError, match="no-such-cluster"):
        autopar.parallelize(sgd, cluster="no-such-cluster")
    with pytest.raises(PlanMismatchError, match="cannot read the plan"):
        autopar.parallelize(sgd, plan=str(tmp_path / "none.json"))


def test_wrong_options_fail_at_decoration():
    with pytest.raises(AutoparError) as error:
        autopar.parallelize(search="alpha")
    assert "did you mean 'alpa'" in str(error.value)
    assert all(name in str(error.value) for name in strategies())
    with pytest.raises(AutoparError, match=r"search=3 is no strategy"):
        autopar.parallelize(search=3)
    with pytest.raises(AutoparError, match=r"batch_argnums has 5; there are 3 positional arguments: p, data, rate"):
        autopar.parallelize(sgd, batch_argnums=5)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"memory_limit": math.inf}, "memory_limit=inf is not a size"),
        ({"time_limit_s": "1"}, "time_limit_s='1' is not a number of seconds"),
        ({"time_limit_s": True}, "time_limit_s=True is not a number of seconds"),
        ({"progress": 3}, "progress=3 cannot be called"),
        ({"verify": 3}, "no target is called 3"),
        ({"constraints": 3}, "constraints=3 is no mapping"),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_fail_at_decoration(option, words):
    with pytest.raises(AutoparError, match=words) as error:
        autopar.parallelize(**option)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"search": 3}, "search=3 are no strategies"),
        ({"seeds": ()}, r"seeds=\(\) are no seeds"),
        ({"seeds": ("a",)}, "are no seeds"),
        ({"steps": 0}, "steps=0 is no number of choices"),
        ({"time_limit_s": -1}, "time_limit_s=-1 is no number of seconds"),
    ],
    ids=str,
)
def test_comparisons_of_a_wrong_type_fail_before_planning(given, words):
    with pytest.raises(AutoparError, match=words) as error:
        autopar.compare(sgd, params(), batch(), **given)
    assert error.value.remedy


def test_one_strategy_and_one_seed_may_stand_alone():
    (trial,) = autopar.compare(sgd, params(), batch(), cluster=CLUSTER, search="replicated", seeds=3).trials
    assert (trial.strategy, trial.seed) == ("replicated", 3) and trial.plan is not None


def test_other_devices_fail_before_planning():
    said = []
    step = autopar.parallelize(sgd, cluster=autopar.Cluster.load("dgx-a100", nodes=2), progress=said.append)
    with pytest.raises(ClusterError, match=r"has 16 devices; this process has 8"):
        step(params(), batch())
    assert not any("planning" in line or "slicing" in line for line in said)


def test_the_mesh_of_a_plan():
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    plan = step.plan(params(), batch())
    mesh = plan.mesh()
    assert dict(mesh.shape) == plan.stages[0].mesh_shape
    placed = jax.device_put(params()["w"], jax.sharding.NamedSharding(mesh, plan.partition_specs()[0]["w"]))
    wanted = step.compile(params(), batch()).input_shardings[0][0]["w"]
    assert placed.sharding.is_equivalent_to(wanted, placed.ndim)
    with pytest.raises(PlanMismatchError, match="for 8 devices"):
        plan.mesh(np.array(jax.devices()[:4]))
    with pytest.raises(PlanMismatchError, match="no stage 1"):
        plan.mesh(stage=1)
