"""The settings of conftest.py hold where tests run, in worker processes too."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import pytest


def test_there_are_eight_cpu_devices() -> None:
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8


def test_floats_have_32_bits_unless_asked() -> None:
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.usefixtures("x64")
def test_floats_have_64_bits_when_asked() -> None:
    assert jnp.ones(1).dtype == jnp.float64


def test_hypothesis_has_no_deadline() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
