"""Sections, and how a terminal draws them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autopar.plan.trail import ranges_of, ranges_text
from autopar.report.sections import Section, communication, expensive_choices, inputs, sections
from autopar.report.terminal import print_plan, print_section
from tests.report.plans import make_plan


def console(width: int = 160) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def printed(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_every_row_has_as_many_cells_as_the_header() -> None:
    for plan in (make_plan(), make_plan(num_stages=2)):
        for section in sections(plan, choices=5):
            assert section.rows
            assert {len(row) for row in section.rows} == {len(section.header)}
            assert all(i < len(section.header) for i in section.right)


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_rows_and_those_left_out_are_all(limit: int) -> None:
    content = make_plan(num_inputs=5, path="state['w{}']").content
    section = inputs(content, limit)
    assert len(section.rows) == min(limit, 5)
    assert len(section.rows) + section.left_out == 5


def test_dear_collectives_and_choices_come_first() -> None:
    content = make_plan(num_operators=3).content
    assert [row[0] for row in communication(content, 10).rows] == ["all-gather", "all-reduce"]
    assert [row[0][-1] for row in expensive_choices(content, 2).rows] == ["2", "1"]


def test_plain_text_of_a_section() -> None:
    section = Section("things", ("name", "size"), (("a", "1"), ("long name", "20")), (1,), 3, "So it is.")
    assert section.text().splitlines() == [
        "things", "  name       size", "  ---------  ----", "  a          1", "  long name  20",
        "  ... 3 more: a page shows them: autopar report PLAN.json -o PLAN.html", "  So it is.",
    ]  # fmt: skip
    assert Section("things", ("name",), ()).text() == "things: none"


def test_terminal_shows_the_plan() -> None:
    where = console()
    print_plan(make_plan(notes=("a note [bold]to[/bold] read",)), where)
    text = printed(where)
    for wanted in ("train_step", "2@x x 4@y", "state['w'][*] x 2", "f32[64@x,32]", "all-reduce", "mesh 8", "3.5 GB"):
        assert wanted in text, wanted
    assert "a note [bold]to[/bold] read" in text  # no markup


@pytest.mark.parametrize("width", [40, 60, 200])
def test_terminal_keeps_to_its_width(width: int) -> None:
    where = console(width)
    print_plan(make_plan(), where)
    assert max(len(line) for line in printed(where).splitlines()) <= width


def test_terminal_says_none() -> None:
    where = console()
    print_section(Section("things", ("name",), ()), where)
    assert printed(where).strip() == "things: none"


def test_ranges_of_numbers_in_any_order_and_given_twice() -> None:
    assert ranges_text(ranges_of([6, 2, 1, 0, 2, 3, 8, 9])) == "0-3, 6, 8, 9"
    assert ranges_text(ranges_of([])) == ""
