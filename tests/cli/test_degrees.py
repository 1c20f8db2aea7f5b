"""Plans by their degrees of parallelism, on the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search import Manual
from autopar.search.baselines import all_degrees, degrees_text, named_degrees
from tests.cli.conftest import Run

TARGET = "train.py:train_step"
CLUSTER = ("--cluster", "dgx-a100")


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_all_degrees_are_those_by_brute_force(nodes: int) -> None:
    cluster = Cluster.load("dgx-a100", nodes=nodes)
    devices = cluster.num_devices
    want = {
        Manual(tp=tp, pp=pp, dp=dp, zero=zero)
        for tp, pp, dp, zero in itertools.product(range(1, 9), range(1, devices + 1), range(1, devices + 1), range(4))
        if tp * pp * dp == devices and (dp > 1 or zero == 0)
    }
    plans = all_degrees(cluster, {})
    assert len(plans) == len(set(plans)) and set(plans) == want
    assert set(all_degrees(cluster, {"pp": 1, "zero": 1})) == {m for m in want if m.pp == 1 and m.zero == 1}
    assert set(all_degrees(cluster, {}, one_microbatch=True)) == {m for m in want if m.zero != 2}
    of_stage_2 = {m for m in want if m.zero == 2}
    assert set(all_degrees(cluster, {"zero": 2}, one_microbatch=True)) == of_stage_2
    assert set(all_degrees(cluster, {"cp": 2})) == {
        Manual(tp=tp, pp=pp, dp=dp, cp=2, zero=zero)
        for tp, pp, dp, zero in itertools.product(range(1, 9), range(1, devices), range(1, devices), range(4))
        if tp * pp * dp * 2 == devices and (dp > 1 or zero == 0)
    }


def test_the_batch_takes_the_devices_that_are_left() -> None:
    cluster = Cluster.load("dgx-a100", nodes=4)
    assert named_degrees(cluster, {"tp": 4, "pp": 2, "zero": 1}) == Manual(tp=4, pp=2, dp=4, zero=1)
    assert named_degrees(cluster, {"tp": 4, "dp": 2}) == Manual(tp=4, dp=2)  # its own error comes with the problem
    with pytest.raises(InfeasiblePlanError, match="tp=3 times pp=1 times cp=1 are 3; dgx-a100 has 32 devices"):
        named_degrees(cluster, {"tp": 3})
    with pytest.raises(InfeasiblePlanError, match="no degrees with tp=64"):
        all_degrees(cluster, {"tp": 64})
    assert degrees_text(Manual(tp=2, dp=4, ep=2, zero=3)) == "tp=2 pp=1 dp=4 ep=2 zero=3"


@pytest.mark.usefixtures("folder")
def test_plan_prices_what_the_degrees_name(run: Run) -> None:
    result = run("plan", TARGET, *CLUSTER, "--tp", "2", "--zero", "1", "--format", "json", "-q")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["plan"]
    assert found["search"]["strategy"] == "manual"
    assert sorted(size for _, size in found["stages"][0]["mesh_axes"]) == [2, 4]
    result = run("plan", TARGET, *CLUSTER, "--tp", "2", "--search", "alpa", "-q")
    assert (result.exit_code, "--tp names a plan" in result.stderr) == (2, True)
    result = run("plan", TARGET, *CLUSTER, "--tp", "5", "-q")
    assert (result.exit_code, "tp=5" in result.stderr) == (1, True)


@pytest.mark.usefixtures("folder")
def test_compare_has_a_row_for_each_of_them(run: Run) -> None:
    result = run("compare", TARGET, *CLUSTER, "--degrees", "--pp", "1", "--zero", "0", "--search", "replicated",
                 "--format", "json", "-q", "-o", "degrees.html")  # fmt: skip
    assert result.exit_code == 0, result.output
    page = Path("degrees.html").read_text(encoding="utf-8")
    assert page.count("<tr") == 6 and "tp=4 pp=1 dp=2 zero=0" in page and "sortKey" in page
    rows = [row["strategy"] for row in json.loads(result.stdout)["ranking"]]
    assert sorted(rows) == [
        "replicated", "tp=1 pp=1 dp=8 zero=0", "tp=2 pp=1 dp=4 zero=0", "tp=4 pp=1 dp=2 zero=0", "tp=8 pp=1 dp=1 zero=0"
    ]  # fmt: skip
    result = run("compare", TARGET, *CLUSTER, "--degrees", "-o", "degrees.txt", "-q")
    assert (result.exit_code, "ends in .html" in result.stderr) == (2, True)
    result = run("compare", TARGET, *CLUSTER, "--tp", "2", "-q")
    assert (result.exit_code, "need --degrees" in result.stderr) == (2, True)
