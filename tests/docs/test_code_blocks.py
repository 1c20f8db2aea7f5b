"""Every Python block of the documentation runs, in the order of its page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks, name

#: Names that blocks of a page take for granted.
SETUP = """
import autopar, jax, jax.numpy as jnp

def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w["w1"] @ w["w2"]) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": loss}

def train_step_args():
    return {"w1": jnp.ones((8, 16)), "w2": jnp.ones((16, 4))}, {"x": jnp.ones((16, 8))}

state, batch = train_step_args()
batches = [batch, batch]
initial_state = jax.tree.map(jnp.copy, state)
"""
#: Marks of blocks: run on Ray, among the slow tests; not run, for it needs a running cluster at an address.
ON_RAY, ADDRESS = "ray", "address"
#: The exercises are run by `tests/docs/test_exercises.py`, each as a test.
PYTHON = {name(p): [b for b in blocks(p) if b.language == "python"] for p in PAGES if p.name != "exercises.md"}


def run(page: str, chosen: list[Block], folder) -> None:
    """Runs blocks in one process with eight devices."""
    assert chosen
    program = "\n".join([SETUP, *("\n" * 2 + b.text for b in chosen)])
    code = compile(program, page, "exec")  # a syntax error names the page
    assert code is not None
    script = folder / "blocks.py"
    script.write_text(
        f"if __name__ == '__main__':\n    exec(compile({program!r}, {page!r}, 'exec'))\n", encoding="utf-8"
    )
    python = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    environment |= {"AUTOPAR_CACHE_DIR": "off", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(python, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(not b.mark for b in found)])
def test_blocks_run(page, tmp_path) -> None:
    run(page, [b for b in PYTHON[page] if not b.mark], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(b.mark == ON_RAY for b in found)])
def test_blocks_run_on_ray(page, tmp_path) -> None:
    run(page, [b for b in PYTHON[page] if b.mark == ON_RAY], tmp_path)


def test_marks_are_known() -> None:
    assert {b.mark for found in PYTHON.values() for b in found} <= {"", ON_RAY, ADDRESS}
