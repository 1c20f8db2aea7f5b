"""A folder with a train step in it, and a way to run commands there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli import main

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import jax
import jax.numpy as jnp

SHAPES = {"w": (64, 64), "x": (32, 64), "y": (32, 64)}


def loss(w, batch):
    return jnp.sum((batch["x"] @ w - batch["y"]) ** 2)


def train_step(state, batch):
    value, grad = jax.value_and_grad(loss)(state["w"], batch)
    return {"w": state["w"] - 0.1 * grad}, value


def example_args():
    leaf = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    return {"w": leaf.pop("w")}, leaf
"""

Run = Callable[..., Result]
Spawn = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``train.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run() -> Run:
    """Runs a command in this process: ``run("plan", "train.py:train_step")``."""

    def call(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), prog_name="autopar")

    return call


@pytest.fixture
def spawn(folder: Path) -> Spawn:
    """Runs a command in a process of its own, as a user does; ``environment`` changes variables (None: unset)."""

    def call(*args: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        changed = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        kept = {name: value for name, value in changed.items() if value is not None}
        command = [sys.executable, "-m", "autopar", *args]
        return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=200)

    return call
