"""Pages on a screen of 768 pixels, without a browser: nothing in them is wider by itself.

`tests/report/test_browser.py` measures the same in a browser, where there is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.report.page import pair_page, plan_page, tables_page
from autopar.report.sections import Section
from autopar.simulate import simulate
from tests.report.large import large_plan
from tests.report.narrow import too_wide
from tests.report.plans import make_plan

ROOT = Path(__file__).resolve().parents[2]
SCREENS = (768, 1024)

PAGES = {
    "one stage": lambda: plan_page(make_plan(notes=("a note",))),
    "pipeline": lambda: plan_page(large_plan(4, 8, 8)),
    "pair": lambda: pair_page(make_plan(), large_plan(4, 8, 8)),
    "tables": lambda: tables_page("a comparison", (Section("degrees", ("a", "b"), (("1", "2"),)),)),
}


@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_a_screen(name: str, width: int) -> None:
    assert too_wide(PAGES[name](), width) == []


@pytest.mark.parametrize(
    ("css", "body", "cause"),
    [
        ("p { overflow-wrap: anywhere } p { width: 800px }", "<p>a</p>", "p: width 800px"),
        ("body { overflow-wrap: anywhere } .a > p { min-width: 60rem }", "<div class='a'><p>a</p></div>", "60rem"),
        ("body { overflow-wrap: anywhere }", "<p style='min-width: 900px'>a</p>", "p: min-width 900px"),
        ("", "<p>a</p>", "p: long words that do not break"),
        (
            "body { overflow-wrap: anywhere } .n { white-space: nowrap }",
            "<p class='n'>a</p>",
            "lines that do not break",
        ),
        ("body { overflow-wrap: break-word }", "<table><tr><td>a</td></tr></table>", "table: a table in no box"),
        ("svg { width: 100% }", "<svg><rect width='900' x='0'></rect></svg>", "svg: a picture of a fixed size"),
        ("", "<svg viewBox='0 0 9 9'></svg>", "svg: a picture that does not shrink"),
        ("svg { width: 100%; min-width: 56rem }", "<svg viewBox='0 0 9 9'></svg>", "svg: min-width 56rem"),
        ("", "<img width='900'>", "img: width 900"),
    ],
)
def test_causes_are_found(css: str, body: str, cause: str) -> None:
    (found,) = too_wide(page_of(css, body), 768)
    assert cause in found
    boxed = page_of(f".scroll {{ overflow-x: auto }} {css}", f"<div class='scroll'>{body}</div>")
    assert too_wide(boxed, 768) == []


def page_of(css: str, body: str) -> str:
    return f"<html><head><style>{css}</style></head><body>{body}</body></html>"


def test_rules_of_other_screens_do_not_hold() -> None:
    css = "body { overflow-wrap: anywhere } @media (max-width: 900px) { p { min-width: 800px } }"
    page = page_of(css, "<p>a</p>")
    assert too_wide(page, 768) and not too_wide(page, 1024)
    assert not too_wide(page.replace("900px", "600px"), 768)


def test_pictures_of_the_documentation_and_of_the_command_line_shrink() -> None:
    pictures = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.svg")}
    pictures["simulate"] = simulate(large_plan(4, 8, 8)).to_svg()
    assert len(pictures) >= 3
    for name, text in pictures.items():
        svg = ElementTree.fromstring(text)
        assert "viewBox" in svg.attrib and "width" not in svg.attrib, name


def test_pages_of_the_documentation_have_no_boxes_of_their_own() -> None:
    """mkdocs' theme scrolls plain tables and code and shrinks pictures; raw HTML it leaves alone."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    raw = re.compile(r"<(table|pre|svg|img|div|iframe|video)\b|\bstyle=|\{[^}\n]*\bwidth=")
    found = {}
    for page in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if lines := [line for line in text.splitlines() if raw.search(line)]:
            found[page.name] = lines
    assert len(pages) > 30 and found == {}
