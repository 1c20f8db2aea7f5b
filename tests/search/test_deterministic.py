"""The same input gives the same plan, byte for byte, in one process and in others."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import parallelize
from examples import llama, mlp
from tests.search.problems import toy

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 4}
#: By name how an example is built, with sizes that make it small.
BUILDS = {
    "llama": (llama.build, {**TEXT, "kv_heads": 2}),
    "mlp": (mlp.build, {}),
}


def plan_text(name: str) -> str:
    """The plan of a small example, as JSON."""
    build, sizes = BUILDS[name]
    fn, args = build(abstract=True, **sizes)
    text: str = parallelize(fn, cluster=toy(4), mesh_shape=(4,)).plan(*args).to_json()
    return text


def digests(*names: str) -> dict[str, str]:
    """Hash of each example's plan."""
    return {name: hashlib.sha256(plan_text(name).encode()).hexdigest() for name in names}


@pytest.mark.slow
def test_twice_in_one_process():
    assert plan_text("llama") == plan_text("llama")
    assert plan_text("mlp") == plan_text("mlp")


@pytest.mark.parametrize(
    ("names", "seed"), [(["mlp"], "1"), pytest.param(sorted(BUILDS), "4242", marks=pytest.mark.slow)]
)
def test_in_another_process(names, seed):
    code = f"from tests.search.test_deterministic import digests; print(*digests(*{names}).items(), sep='\\n')"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [str(item) for item in digests(*names).items()]
