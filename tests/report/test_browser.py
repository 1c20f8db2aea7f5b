"""Pages in a browser: Chromium where it is installed, and the engine of `requirements/browser.in` (make test-browser).

The engine runs in a process of its own, so that its crash is a test that fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.report.page import pair_page, plan_page
from autopar.simulate import simulate
from tests.cli.conftest import ROOT
from tests.report.large import large_plan
from tests.report.plans import make_plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ENGINE = find_spec("PyQt6") is not None and find_spec("PyQt6.QtWebEngineCore") is not None
needs_engine = pytest.mark.skipif(not ENGINE, reason="`requirements/browser.in` is not installed (make test-browser)")

WIDTH = 1280
# No display, no sandbox (which wants rights that containers lack), no device to draw with.
FLAGS = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu"}
STAGES, LAYERS = 64, 96

# For each timeline on the page: its strokes by kind, and how many events have their middle on one of their kind.
LOOK = """
(() => {
  const events = %s, kinds = {forward: "s0", backward: "s2"};
  const pictures = [...document.querySelectorAll("svg.picture")];
  const timelines = pictures.filter(p => p.querySelector("path"));
  return {
    scroll: document.documentElement.scrollWidth,
    heights: pictures.map(p => p.getBoundingClientRect().height),
    text: Math.min(...pictures.map(p => 11 * p.getBoundingClientRect().width / p.viewBox.baseVal.width)),
    split: [...document.querySelectorAll("td.n, th")].filter(
      c => c.checkVisibility() && c.getClientRects().length && c.scrollWidth > c.clientWidth + 1).length,
    bars: timelines.map(p => Object.values(kinds).map(k => p.querySelector("." + k).getAttribute("d").split("h").length - 1)),
    hits: timelines.map((p, n) => {
      const box = p.querySelector("rect.bg").getBBox(), point = p.createSVGPoint();
      return events[n].list.filter(([kind, worker, at]) => {
        point.x = box.x + at * box.width;
        point.y = box.y + (worker + 0.5) * box.height / events[n].workers;
        const path = p.querySelector("." + kinds[kind]);
        return getComputedStyle(path).stroke.startsWith("rgb(") && path.isPointInStroke(point);
      }).length;
    }),
  };
})()
"""  # noqa: E501


@dataclass(frozen=True)
class Seen:
    """What the engine says of a page.

    Args:
        loaded: whether all of it was.
        requests: addresses that it asked for.
        console: what scripts and the engine said.
        colors: share of the pixels by color.
        value: of the script.
    """

    loaded: bool
    requests: list[str]
    console: list[str]
    colors: dict[str, float]
    value: dict[str, object]


def look(source: str, folder: Path, script: str = "document.documentElement.scrollWidth", width: int = WIDTH) -> Seen:
    """A page in the engine, in a process of its own."""
    page = folder / "page.html"
    page.write_text(source, encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests/report/browser.py"), str(page), str(folder / "page.png"), str(width)]
    done = subprocess.run(
        command, input=script, env={**os.environ, **FLAGS}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"the browser ended with {done.returncode}: {done.stderr[-2000:]}"
    return Seen(**json.loads(done.stdout.splitlines()[-1]))


def events(*plans: Plan, every: int = 1) -> str:
    """The middles of forwards and backwards of each plan, as shares of its step; of many each so many-th."""
    found = []
    for plan in plans:
        timeline = simulate(plan)
        works = [e for e in timeline.events if e.kind in ("forward", "backward")]
        middles = [[e.kind, e.worker, float((e.start_s + e.end_s) / 2) / timeline.step_time] for e in works[::every]]
        found.append({"workers": timeline.num_workers, "list": middles})
    return LOOK % json.dumps(found)


def whole(seen: Seen, source: str, folder: Path) -> None:
    """What holds of every page."""
    assert seen.loaded
    assert len(source.encode()) < 10**6
    assert [r.rpartition("/")[2] for r in seen.requests] == ["page.html"]
    assert seen.console == []
    assert seen.value["scroll"] <= WIDTH, "it runs over the side"
    assert seen.value["text"] >= 8, "texts of pictures are too small to be read"
    assert seen.value["split"] == 0, "figures or titles of columns are cut"
    assert (folder / "page.png").stat().st_size > 10_000
    assert max(seen.colors.values()) < 0.9 and len(seen.colors) > 20, "the picture is blank"
    for color in ("#2f6fb3", "#3d9a50"):  # forward and backward
        assert seen.colors.get(color, 0) > 0.01, f"nothing is painted in {color}"


@needs_engine
def test_64_stages_and_96_layers(tmp_path: Path) -> None:
    plan = large_plan(STAGES, LAYERS, microbatches=48)
    source = plan_page(plan)
    seen = look(source, tmp_path, events(plan, every=8))
    whole(seen, source, tmp_path)
    assert seen.value["hits"] == [2 * STAGES * 48 // 8]
    heights = seen.value["heights"]
    assert len(heights) == 4 and min(heights) > 300  # 64 rows each, or 16 lines of nodes


@needs_engine
def test_every_instruction_has_a_bar(tmp_path: Path) -> None:
    """With few microbatches none is too narrow to be told from the next."""
    plan = large_plan(STAGES, LAYERS, microbatches=8)
    source = plan_page(plan)
    seen = look(source, tmp_path, events(plan))
    whole(seen, source, tmp_path)
    assert seen.value["bars"] == [[STAGES * 8, STAGES * 8]]
    assert seen.value["hits"] == [2 * STAGES * 8]


@needs_engine
def test_two_plans_side_by_side(tmp_path: Path) -> None:
    plans = large_plan(STAGES, LAYERS, microbatches=16), large_plan(32, LAYERS, microbatches=16)
    source = pair_page(*plans, ("a.json", "b.json"))
    seen = look(source, tmp_path, events(*plans, every=4))
    whole(seen, source, tmp_path)
    assert seen.value["hits"] == [2 * STAGES * 4, 2 * 32 * 4]


@needs_engine
def test_one_stage(tmp_path: Path) -> None:
    source = plan_page(make_plan(num_inputs=50, num_operators=50, path="state['blocks'][{}]" + "['kernel']" * 15))
    seen = look(source, tmp_path)
    assert seen.loaded and seen.console == [] and len(seen.requests) == 1
    assert seen.value <= WIDTH
    assert seen.colors.get("#2f6fb3", 0) > 0


# Figures on two lines, tables that scroll, and the figures of a column in order of two clicks on its name.
FIT_AND_SORT = """
(() => {
  const rows = [...document.querySelectorAll("details.table td.n")];
  const boxes = [...document.querySelectorAll("details.table .scroll")];
  const texts = (table, place) => [...table.tBodies[0].rows].map(row => row.cells[place].textContent.trim());
  const [table, place] = [...document.querySelectorAll("details.table table")]
    .flatMap(t => [...t.querySelectorAll("tbody tr:first-child td.n")].map(c => [t, c.cellIndex]))
    .filter(([t]) => t.querySelector("button.sort"))
    .sort((a, b) => new Set(texts(...b)).size - new Set(texts(...a)).size)[0];
  const button = table.querySelectorAll("th")[place].querySelector("button");
  const clicked = () => { button.click(); return texts(table, place); };
  return {
    scroll: document.documentElement.scrollWidth,
    broken: rows.filter(c => c.checkVisibility() && c.getBoundingClientRect().height > 32).length,
    scrolled: boxes.filter(s => s.scrollWidth > s.clientWidth + 1).length,
    figures: rows.length, orders: [clicked(), clicked()],
  };
})()
"""


@needs_engine
@pytest.mark.parametrize("width", [768, 1280])
def test_tables_fit_and_are_sorted_by_clicks(width: int, tmp_path: Path) -> None:
    seen = look(plan_page(large_plan(4, 8, microbatches=8)), tmp_path, FIT_AND_SORT, width)
    assert seen.loaded and seen.console == []
    assert seen.value["scroll"] <= width and seen.value["scrolled"] == seen.value["broken"] == 0
    assert seen.value["figures"] > 20
    rising, falling = ([number(text) for text in order] for order in seen.value["orders"])
    assert len(set(rising)) > 1 and rising == sorted(rising) and falling == sorted(rising, reverse=True)


def number(text: str) -> float:
    """A figure of a page."""
    value, _, unit = text.replace(",", "").partition(" ")
    return float(value.rstrip("%")) * {"us": 1e-6, "ms": 1e-3, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}.get(unit, 1)


@needs_engine
def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    """A page that asks for others, whose script fails and that is too wide is told from one that is right."""
    seen = look(
        "<!DOCTYPE html><title>x</title><img src='http://example.invalid/a.png'><div style='width:3000px'>"
        "wide</div><script>missing()</script>",
        tmp_path,
    )
    assert "http://example.invalid/a.png" in seen.requests
    assert any("missing is not defined" in said for said in seen.console)
    assert seen.value > WIDTH
    assert max(seen.colors.values()) > 0.9, "almost nothing is painted"


@needs_engine
def test_a_crash_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qt aborts where it has no such platform."""
    monkeypatch.setitem(FLAGS, "QT_QPA_PLATFORM", "none-of-that-name")
    with pytest.raises(AssertionError, match="the browser ended with -6"):
        look("<p>x</p>", tmp_path)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def in_chromium(source: str, folder: Path, script: str, width: int) -> list[float]:
    """The numbers that ``script``, an expression, gives on a page in a frame of ``width`` pixels."""
    (folder / "plan.html").write_text(source, encoding="utf-8")
    frame = folder / "frame.html"  # headless windows are at least 500 pixels wide, frames are not
    frame.write_text(
        f"<!DOCTYPE html><title></title><iframe src='plan.html' style='border:0' width={width} height=900></iframe>"
        "<script>onload = () => { const page = frames[0].document, window = frames[0]; "
        f"document.title = JSON.stringify({script}); }}</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900",
         "--allow-file-access-from-files", f"--user-data-dir={folder}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    return [float(n) for n in json.loads(title.group(1))]


@needs_chromium
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_in_chromium(width: int, tmp_path: Path) -> None:
    source = plan_page(large_plan(STAGES, LAYERS, microbatches=8))
    script = (
        "[page.documentElement.scrollWidth, ...[...page.querySelectorAll('svg.picture')].flatMap("
        "s => [s.getBoundingClientRect().height, 11 * s.getBoundingClientRect().width / s.viewBox.baseVal.width])]"
    )
    scroll, *sizes = in_chromium(source, tmp_path, script, width)
    assert scroll <= width, "it runs over the side"
    heights, texts = sizes[::2], sizes[1::2]
    assert len(heights) == 4 and min(heights) > 300  # 64 rows each, or 16 lines of nodes
    assert min(texts) >= 8, "texts of pictures are too small to be read"


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_cells_are_not_cut(width: int, tmp_path: Path) -> None:
    """Below 600 pixels each row is a card with the names of its columns; no cell is wider than its place."""
    source = plan_page(make_plan(num_inputs=5, num_operators=5, path="state['blocks'][{}]" + "['kernel']" * 15))
    script = (
        "(() => { const cells = [...page.querySelectorAll('details.table td')];"
        "const cut = cells.filter(c => c.scrollWidth > c.clientWidth + 1).length;"
        "const names = cells.filter(c => window.getComputedStyle(c, '::before').content.length > 4).length;"
        "return [page.documentElement.scrollWidth, cells.length, cut, names]; })()"
    )
    scroll, cells, cut, names = in_chromium(source, tmp_path, script, width)
    assert scroll <= width and cells > 20 and cut == 0
    assert names == (cells if width < 600 else 0)


@needs_chromium
@pytest.mark.parametrize("width", [768, 1280])
def test_figures_stay_on_a_line_and_tables_in_the_window(width: int, tmp_path: Path) -> None:
    source = plan_page(large_plan(2, 4, microbatches=8))
    script = (
        "(() => { const figures = [...page.querySelectorAll('details.table td.n')];"
        "const tables = [...page.querySelectorAll('details.table .scroll')];"
        "const wide = tables.filter(s => s.scrollWidth > s.clientWidth + 1);"
        "return [figures.length, figures.filter(c => c.getBoundingClientRect().height > 32).length, wide.length]; })()"
    )
    figures, broken, wide = in_chromium(source, tmp_path, script, width)
    assert figures > 10 and broken == 0 and wide == 0


@needs_chromium
def test_search_and_folding(tmp_path: Path) -> None:
    source = plan_page(make_plan(num_inputs=12, num_operators=5))
    script = (
        "(() => { const box = page.querySelector('#filter');"
        "const rows = [...page.querySelectorAll('details.table tbody tr')];"
        "const shown = () => rows.filter(row => row.checkVisibility()).length;"
        "const type = text => { box.value = text; box.dispatchEvent(new window.Event('input')); return shown(); };"
        "const all = shown(), one = type('all-gather'), none = type('no such row'), again = type('');"
        "page.querySelector('[data-fold=\"\"]').click(); const folded = shown();"
        "page.querySelector('[data-fold=open]').click(); return [all, one, none, again, folded, shown()]; })()"
    )
    everything, one, none, again, folded, unfolded = in_chromium(source, tmp_path, script, 1280)
    assert 0 < one < everything and none == 0 and again == everything == unfolded and folded == 0
