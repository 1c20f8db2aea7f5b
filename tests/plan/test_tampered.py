"""Files that were changed by hand: each is a typed error, soon, or a plan that can be printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import ClusterError, PlanMismatchError
from autopar.plan import Plan
from tests.plan.test_json import small_plan


def changed(path: str, value: Any) -> str:
    document = json.loads(small_plan().to_json())
    *way, last = path.split(".")
    at = document["plan"]
    for name in way:
        at = at[int(name)] if name.isdecimal() else at[name]
    at[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("step_time", -1.0, "step_time"),
        ("stages.0.step_time", -0.5, r"stages\[0\].step_time"),
        ("search.objective", -1, "search.objective"),
        ("peak_memory", -1, "peak_memory"),
        ("num_microbatches", 0, "num_microbatches"),
        ("num_microbatches", 10**12, "num_microbatches"),
        ("stages", [], "stages"),
        ("stages.0.devices", [0], "devices"),
        ("stages.0.devices", [-1, 1], "devices"),
        ("inputs.0.layout", "", "layout"),
        ("inputs.0.layout", "[.,.,.,.,.]", "layout"),
        ("inputs.0.stage", 7, "stage"),
        ("outputs.0.stage", -1, "stage"),
    ],
)
def test_what_no_plan_says_is_named(path: str, value: Any, field: str) -> None:
    with pytest.raises(PlanMismatchError, match=field):
        Plan.from_json(changed(path, value))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["[" * 200_000, '{"autopar_plan":1,"plan":' + "[" * 200_000, '{"a":' * 100_000])
def test_deep_texts_are_no_plans_and_no_clusters(text: str) -> None:
    with pytest.raises(PlanMismatchError):
        Plan.from_json(text)
    with pytest.raises(ClusterError):
        Cluster.from_json(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 50_000, "a = " + "{a=" * 20_000, "[" + ".".join("a" * 50_000) + "]\n", "\n".join(
        "[" + ".".join("a" * n) + "]" for n in range(1, 400)
    ), ".".join("a" * 50_000) + " = 1\n", "#" * (1 << 20) + "#"],
    ids=["arrays", "inline tables", "one table", "tables", "dotted key", "large"],
)  # fmt: skip
def test_deep_and_large_cluster_files_are_errors(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ClusterError):
        Cluster.load(file)


def test_a_count_that_no_cluster_has_is_an_error() -> None:
    data = Cluster.load("local-cpu").to_dict()
    data["groups"][0]["count"] = 10**12
    with pytest.raises(ClusterError, match="count"):
        Cluster.from_dict(data)
