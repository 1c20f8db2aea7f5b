"""The HTML page, read with Python's parser."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from autopar.plan import Plan
from autopar.plan.details import Details, OperatorDetail
from autopar.report.page import MAX_ROWS, memory_bars, plan_page, text_of, time_bars
from autopar.schedule import build, chain, get
from autopar.simulate import equal_stages, record_of, routes_of
from tests.report.plans import make_plan

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}


class Page(HTMLParser):
    """Text, tags and attributes of a page; fails where tags do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["style"], ["script"]):
            return
        if self.tags[-1:] == [("wbr", {})] and self.words:
            self.words[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.tags)


def test_page_shows_every_part() -> None:
    page = Page(plan_page(make_plan(notes=("a note to read",))))
    for wanted in (
        "train_step on dgx-a100", "2 ms", "3.5 GB", "4.4% of 80 GB", "state['w'][*] x 2", "f32[64@x,32]", "all-gather",
        "mesh 8", "a note to read", "jvp()/dot_general.2", "[.,x],[x,.] -> [.,.]", "200 us",
    ):  # fmt: skip
        assert wanted in page.text, wanted
    assert page.count("svg") == 3


def test_page_needs_nothing_else() -> None:
    source = plan_page(make_plan())
    page = Page(source)
    assert {"link", "img", "iframe", "object"}.isdisjoint(t for t, _ in page.tags)
    assert all("src" not in attributes for tag, attributes in page.tags if tag == "script")
    assert all("src" not in attrs and (attrs.get("href") or "#").startswith("#") for _, attrs in page.tags)
    assert "http" not in source and "@import" not in source and "url(" not in source


def test_what_users_write_is_text() -> None:
    page = Page(plan_page(make_plan(path="<script>alert({})</script>", notes=("<b>&amp;</b>",))))
    assert page.count("script") == 1 and page.count("b") == 5  # the page's own script, five head figures
    assert "<script>alert(1)</script>" in page.text and "<b>&amp;</b>" in page.text


@pytest.mark.slow
def test_page_of_a_large_program_is_small() -> None:
    path = "state['opt_state'][1][0].mu['block{}']['attention']['query']['kernel']"
    plan = make_plan(num_operators=5000, num_inputs=5000, path=path, notes=("n" * 1000,) * 5000)
    source = plan_page(plan)
    assert len(source.encode()) < 10**6
    assert f"{5000 - MAX_ROWS} more are not shown" in Page(source).text


def test_the_dearest_choice_comes_first() -> None:
    text = Page(plan_page(make_plan(num_operators=60))).text
    assert text.index("dot_general.59") < text.index("dot_general.58") < text.index("dot_general.10")
    assert "dot_general.9 " not in text  # 50 of 60 are shown


def test_equal_plans_give_equal_pages() -> None:
    assert plan_page(make_plan()) == plan_page(make_plan())


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(num_stages=3),
        make_plan(lower_bound=None, considered=()),
        make_plan(num_inputs=0, num_operators=0),
        make_plan(cluster="{}"),
        make_plan(step_time=0.0),
    ],
    ids=["stages", "no-bound", "empty", "no-cluster", "no-time"],
)
def test_pages_of_unusual_plans_nest(plan: Plan) -> None:
    assert "train_step" in Page(plan_page(plan)).text


@pytest.mark.parametrize("parameters", [0, 10**9, 10**11])
def test_bars_fill_their_width(parameters: int) -> None:
    plan = make_plan(parameters=parameters, num_stages=2)
    by_kind, of_device, *_ = memory_bars(plan.content)
    assert sum(p.width for p in by_kind.parts) == pytest.approx(100, abs=0.01)
    assert [p.label for p in by_kind.parts] == [*(["parameters"] if parameters else []), "optimizer", "activations"]
    assert of_device.limit is not None
    used = sum(p.width for p in of_device.parts)
    # The longer of what is used and what there is fills the width.
    assert max(used, of_device.limit) == pytest.approx(100, abs=0.01)
    assert (used > of_device.limit) == (plan.peak_memory > 80 * 10**9)
    for bar in (*memory_bars(plan.content), *time_bars(plan.content)):
        for left, right in zip(bar.parts, bar.parts[1:], strict=False):
            assert right.start == pytest.approx(left.start + left.width, abs=0.01)


def test_a_pipeline_is_drawn() -> None:
    table = get("1f1b").table(2, 3)
    dataflow = chain(table)
    durations = equal_stages(table, dataflow, {"forward": 1e-3, "backward": 2e-3})
    record = record_of(table, dataflow, durations, routes_of(build(table, dataflow)))
    content = msgspec.structs.replace(make_plan().content, pipeline=record)
    page = Page(plan_page(Plan(content)))
    assert "Timeline" in page.words
    assert "forward 0, microbatch 2: 2 ms to 3 ms" not in page.words  # it waits for the first backward
    assert "forward 0, microbatch 0: 0 s to 1 ms" in page.words
    assert "Timeline" not in Page(plan_page(make_plan())).words


def test_choices_link_to_their_lines_and_show_shapes(tmp_path: Path) -> None:
    plan = make_plan()
    chosen = sorted(plan.content.choices, key=lambda k: (-k.cost, k.name))
    line = text_of.__code__.co_firstlineno
    operators = tuple(
        OperatorDetail(k.name, f"einsum.py:9:2 (einsum), from page.py:{line} (text_of)", f"ab,bc->ac  {n}")
        for n, k in enumerate(chosen)
    )
    page = Page(plan_page(replace(plan, details=Details(operators))))
    ids = [attrs["id"] for tag, attrs in page.tags if tag == "tr" and "id" in attrs]
    links = [str(attrs["href"]) for tag, attrs in page.tags if tag == "a"]
    assert len(ids) == len(set(ids)) == 1 and links == [f"#{ids[0]}"] * len(chosen)
    assert "def text_of(place: str, folders" in page.text
    hover = [attrs["title"] for tag, attrs in page.tags if tag == "td" and "title" in attrs]
    assert hover == [d.form for d in operators]
    # A plan without details, or on a machine without the file, has no listing or no text.
    assert "source lines" not in plan_page(plan)
    gone = tuple(OperatorDetail(d.id, "of_nobody.py:3 (loss)", d.form) for d in operators)
    elsewhere = Page(plan_page(replace(plan, details=Details(gone))))
    assert "of_nobody.py:3 (loss)" in elsewhere.text and elsewhere.count("a") == len(chosen)
    # A plan that was saved is shown with the lines of files next to it.
    (tmp_path / "of_nobody.py").write_text("one\ntwo\nloss = of(model)\n", encoding="utf-8")
    found = Page(plan_page(replace(plan, details=Details(gone)), (tmp_path, tmp_path / ".")))
    assert "loss = of(model)" in found.text and "loss = of(model)" not in elsewhere.text


def test_stages_name_the_layers_of_a_stack() -> None:
    plan = make_plan(num_stages=2)
    stages = tuple(
        msgspec.structs.replace(s, layers=(12 * n, 12 * n + 12, 24)) for n, s in enumerate(plan.content.stages)
    )
    stacked = replace(plan, content=msgspec.structs.replace(plan.content, stages=stages))
    for text in (str(stacked), Page(plan_page(stacked)).text):
        assert "layers 0-11 of 24" in text and "layers 12-23 of 24" in text
    assert json.loads(stacked.to_json())["plan"]["stages"][1]["layers"] == [12, 24, 24]
    assert "of 24" not in str(plan) and '"layers"' not in plan.to_json()
