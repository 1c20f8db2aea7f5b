"""The coverage page is what its generator writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]


def _generator():
    spec = importlib.util.spec_from_file_location("coverage_page", ROOT / "docs" / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date():
    page = (ROOT / "docs" / "coverage.md").read_text()
    if f"with jax {jax.__version__}" not in page:
        pytest.skip("the page is of another jax")
    assert page == _generator().text(), "run: python docs/coverage.py"


def test_it_knows_every_primitive_and_names_each_once():
    names = [name for _, name, _, _ in _generator().rows()]
    assert {"dot_general", "scan", "io_callback", "conv_general_dilated"} <= set(names)
    assert len(names) == len(set(names))
