"""Files that were changed by hand: each is a typed error, soon, or a plan that can be printed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, PlanMismatchError
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
        ("inputs.0.layout", "[nowhere,.]", "nowhere"),
        ("inputs.0.type", "f32[8,x]", "type"),
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


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(w for key, v in inside for w in places(v, (*way, key)))][not way :]


JUNK = (None, True, -1, 0, 2**31, 10**12, 1e308, -0.5, "", "x" * 300, "[x,.]", [], [0], [[]], {}, {"a": 1})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_with_any_value_changed_is_a_plan_or_an_error(seed: int) -> None:
    """A hundred places a seed, each with another value, without it, or twice."""
    draw = random.Random(seed)
    text = changed("num_microbatches", 1)
    everywhere = places(json.loads(text))
    refused = 0
    for _ in range(100):
        document = json.loads(text)
        way = draw.choice(everywhere)
        at = document
        for key in way[:-1]:
            at = at[key]
        match draw.randrange(4):
            case 0:
                del at[way[-1]]
            case 1 if isinstance(at, list):
                at.append(at[way[-1]])
            case _:
                at[way[-1]] = draw.choice(JUNK)
        began_s = time.process_time()
        try:
            plan = Plan.from_json(json.dumps(document))
            str(plan)
        except AutoparError:
            refused += 1
        assert time.process_time() - began_s < 5, way
    assert refused > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_plan_with_bits_flipped_is_a_plan_or_an_error(seed: int) -> None:
    draw = random.Random(seed)
    data = changed("num_microbatches", 1).encode()
    refused = 0
    for _ in range(150):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            Plan.from_json(bytes(flipped))
        except AutoparError:
            refused += 1
    assert refused > 50
