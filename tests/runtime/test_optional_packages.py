"""Packages that only some paths use are optional: the first use says what to install."""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from autopar.errors import ClusterError
from autopar.runtime.ray.metrics import Metrics
from autopar.runtime.ray.tls import new_identity

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def without(monkeypatch):
    """Hides a package from imports."""

    def hide(package: str) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_a_cluster_counts_nothing_without_prometheus(without):
    without("prometheus_client")
    metrics = Metrics()
    metrics.step_s.observe(1.0)
    metrics.sent_bytes.inc(5)
    for read in (lambda: metrics.text, lambda: metrics.registry):
        with pytest.raises(ClusterError, match="prometheus-client") as error:
            read()
        assert error.value.remedy == "pip install 'autopar[metrics]'"


def test_numbers_with_prometheus():
    metrics = Metrics()
    metrics.sent_bytes.inc(5)
    assert "autopar_sent_bytes_total 5.0" in metrics.text


def test_encryption_says_what_it_needs(without):
    assert b"BEGIN CERTIFICATE" in new_identity().certificate
    without("cryptography")
    with pytest.raises(ClusterError, match="cryptography") as error:
        new_identity()
    assert error.value.remedy == "pip install 'autopar[tls]'"


def test_what_users_install_has_no_tools_of_development():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"checkpoint", "cuda12", "cuda12-aot", "examples", "metrics", "tls", "tpu"} and all(
        extras.values()
    )
    installed = {re.match(r"[a-z0-9-]+", line)[0] for line in (*PROJECT["dependencies"], *chain(*extras.values()))}
    assert not installed & {"pytest", "mypy", "ruff", "hypothesis", "blackjax"}
    assert not {"prometheus-client", "cryptography"} & {
        re.match(r"[a-z0-9-]+", line)[0] for line in PROJECT["dependencies"]
    }
