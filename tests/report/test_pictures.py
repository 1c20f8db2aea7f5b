"""Pages of plans with many stages, side by side, and as graphs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.report.dot import plan_dot
from autopar.report.layers import layers, link_of, links, why
from autopar.report.page import pair_page, pictures, plan_page
from autopar.report.pictures import cluster_svg, memory_svg, timeline_svg
from autopar.simulate import simulate
from examples import mlp
from tests.cli.conftest import ROOT, Run, run  # noqa: F401
from tests.report.large import LEAVES, large_plan
from tests.report.plans import make_plan
from tests.report.test_page import Page
from tests.search.problems import toy


@pytest.fixture(scope="module")
def large() -> Plan:
    """64 stages and 96 layers; fewer microbatches than in training, for speed."""
    return large_plan(microbatches=8)


@pytest.fixture(scope="module")
def small() -> Plan:
    """A pipeline that the search made."""
    fn, args = mlp.build(abstract=True)
    return autopar.parallelize(fn, cluster=toy(8), num_stages=2, num_microbatches=4).plan(*args)


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_the_page_of_64_stages_and_96_layers(large: Plan) -> None:
    source = plan_page(large)
    assert len(source.encode()) < 10**6
    text = Page(source).words
    for title in ("Timeline", "Stages on the cluster", "Memory by kind", "Busy time of a step",
                  "sharding of each layer", "communication by link", "considered"):  # fmt: skip
        assert title in text, title
    assert "stages 0-63: 8@x" in text
    assert not re.search(r"(src|href)=|@import|url\(|<script ", source)
    assert source == plan_page(large)


def test_every_stage_and_device_is_drawn(large: Plan) -> None:
    texts = [t.text for t in drawn(cluster_svg(large.content)).iter() if t.tag.endswith("text")]
    assert {f"node {n}" for n in range(64)} <= set(texts)
    assert [texts.count(str(s)) for s in range(64)] == [8] * 64
    memory = drawn(memory_svg(large.content, 80 * 10**9))
    height = float((memory.get("viewBox") or "").split()[3])
    rects = [e for e in memory.iter() if e.tag.endswith("rect")]
    assert len(rects) > 64 and all(float(e.get("y", 0)) + float(e.get("height", 0)) <= height for e in rects)
    rows = [t.text for t in memory.iter() if t.tag.endswith("text")]
    assert {f"stage {s}" for s in range(64)} <= set(rows)
    assert "memory of a device: 80 GB" in rows


def test_the_lengths_of_a_timeline_are_those_of_the_events(large: Plan) -> None:
    timeline = simulate(large)
    svg = drawn(timeline_svg(timeline))
    paths = {e.get("class"): e.get("d") or "" for e in svg.iter() if e.tag.endswith("path")}
    for kind, color in (("forward", "s0"), ("backward", "s2")):
        length = sum(float(w) for w in re.findall(r"h([\d.]+)", paths[color]))
        busy = sum(e.end_s - e.start_s for e in timeline.events if e.kind == kind) / timeline.step_time * 1000
        assert length == pytest.approx(busy, rel=0.03)
    assert len([e for e in svg.iter() if (e.text or "").startswith("worker ")]) == 64


def test_layers_that_lie_alike_share_a_row(large: Plan) -> None:
    section = layers(large.content, 100)
    assert len(section.rows) == 2 * len(LEAVES)
    assert ("state['params'][*]['mlp.up']", "parameter", "0-95", "0-63", "f32[12288,49152@x=8]") in section.rows
    assert layers(large.content, 3).left_out == 2 * len(LEAVES) - 3


def test_the_number_of_a_layer_is_not_that_of_a_place_in_a_tuple() -> None:
    plan = make_plan(num_inputs=4, path="state[0]['layers'][{}]['w']")
    assert [(row[0], row[2]) for row in layers(plan.content, 100).rows] == [("state[0]['layers'][*]['w']", "0-3")]


def test_links(large: Plan) -> None:
    rows = {(link, kind): (count, share) for link, kind, count, _, _, share in links(large.content).rows}
    assert rows == {
        ("inside a node, 300 GB/s", "all-reduce"): ("2048", "88.2%"),
        ("between stages", "send"): ("512", "11.8%"),
    }
    assert sum(float(s.rstrip("%")) for _, s in rows.values()) == pytest.approx(100, abs=0.2)
    two = Cluster.load("dgx-a100", nodes=2)
    content = msgspec.structs.replace(
        make_plan(axes=(("x", 2), ("y", 8))).content, cluster=two.to_json(), cluster_name=str(two)
    )
    stage = msgspec.structs.replace(content.stages[0], devices=tuple(range(16)))
    assert link_of(content, stage, "y").startswith("inside a node")
    assert link_of(content, stage, "x").startswith("between nodes")
    assert link_of(content, stage, "x+y").startswith("between nodes")
    assert link_of(content, stage, "z") == "unknown"


def test_why_names_the_next_best(large: Plan) -> None:
    said = why(large.content)
    assert "Of 3 options this is the fastest; the next, 32 stages, 128 microbatches, is 14.3% slower." in said
    search = msgspec.structs.replace(large.content.search, lower_bound=0.9 * large.step_time)
    assert "It is at most 10.00% from the optimum." in why(msgspec.structs.replace(large.content, search=search))
    assert "proven optimal" in why(make_plan().content)


def test_two_plans_side_by_side(large: Plan, small: Plan) -> None:
    source = pair_page(large, small, ("a.json", "b.json"))
    assert len(source.encode()) < 10**6
    words = Page(source).words
    assert {"a.json", "b.json", "figures"} <= set(words)
    assert words.count("Timeline") == 2
    assert "The plans are equal." in Page(pair_page(small, small)).words
    assert "The plans are equal." not in words
    one = Page(pair_page(make_plan(), make_plan(step_time=1.0))).words
    assert one.count("Memory by kind") == 2


@pytest.mark.slow
def test_a_plan_of_the_search_has_all_pictures(small: Plan) -> None:
    assert [title for title, _ in pictures(small)] == [
        "Timeline", "Stages on the cluster", "Memory by kind", "Busy time of a step"
    ]  # fmt: skip
    for _, svg in pictures(small):
        drawn(svg)
    assert pictures(make_plan()) == ()
    assert "forward 0, microbatch 0" in " ".join(Page(plan_page(small)).words)


def test_dot(large: Plan, small: Plan) -> None:
    text = plan_dot(small)
    assert text.startswith("digraph plan {") and text.endswith("}\n")
    assert re.search(r'stage0 -> stage1 \[label="\d+ values?, [\d.]+ \w+"\];', text)
    assert re.search(r"stage1 -> stage0", text)  # cotangents
    assert len(re.findall(r"^  stage\d+ \[", plan_dot(large), re.M)) == 64
    assert "f32[64@x=2,32]" in plan_dot(make_plan())


def test_the_command(run: Run, tmp_path: Path, small: Plan) -> None:  # noqa: F811
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    small.save(a)
    make_plan().save(b)
    result = run("report", a, "-o", str(tmp_path / "plan.html"))
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == plan_page(Plan.load(a))
    assert run("report", a, b).stdout == pair_page(Plan.load(a), Plan.load(b), (a, b))
    assert run("report", a, "--format", "dot").stdout == plan_dot(small)
    assert run("report", a, "-o", str(tmp_path / "plan.dot")).exit_code == 0
    assert (tmp_path / "plan.dot").read_text(encoding="utf-8") == plan_dot(small)
    assert run("report", a, b, "--format", "dot").exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there(shell: str) -> None:
    code = "from autopar.cli import main; main(prog_name='autopar')"
    environment = {**os.environ, "_AUTOPAR_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert "_AUTOPAR_COMPLETE" in done.stdout
