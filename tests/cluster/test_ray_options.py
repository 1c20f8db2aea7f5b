"""Options of clusters on Ray: said once to users, carried by one value."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from autopar import Cluster
from autopar.cluster.ray_options import RayOptions
from autopar.errors import ClusterError


def test_options_are_those_of_the_public_function() -> None:
    _, *keywords = inspect.signature(Cluster.ray).parameters.values()
    fields = dataclasses.fields(RayOptions)
    assert [(k.name, k.default) for k in keywords] == [(f.name, f.default) for f in fields]
    assert [str(k.annotation) for k in keywords] == [str(f.type) for f in fields]


@pytest.mark.parametrize(
    ("name", "value"),
    [("transport", "pigeon"), ("start_s", 0), ("load_s", True), ("attempts", 1.5), ("devices_per_worker", (2, 0))],
)
def test_values_that_mean_nothing_are_refused(name: str, value: object) -> None:
    with pytest.raises(ClusterError, match=name):
        RayOptions(**{name: value})  # type: ignore[arg-type]
