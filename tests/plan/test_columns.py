"""Text that keeps to a width."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autopar.plan import Plan
from autopar.plan.columns import _GAP, _fitted, labelled, table, wrapped
from autopar.plan.text import explain_text, plan_text
from autopar.report.sections import sections
from autopar.report.terminal import print_plan
from tests.plan.plans import small_plan
from tests.report.plans import make_plan

WORDS = st.lists(st.text("ab]./", min_size=1, max_size=30), max_size=12).map(" ".join)


def large_plan() -> Plan:
    path = "state['opt_state'][1][0].mu['block{}']['attention']['query']['kernel']"
    plan = make_plan(num_operators=50, num_inputs=60, path=path, notes=("a note with many words " * 12,))
    first = plan.content.stages[0]
    memory = msgspec.structs.replace(first.memory, activations=123456789012, temporaries=43100000000)
    stages = (msgspec.structs.replace(first, memory=memory),)
    return Plan(msgspec.structs.replace(plan.content, stages=stages), phases=(("trace", 1.0), ("search", 2.0)) * 6)


PLANS = {
    "small": small_plan,
    "one stage": make_plan,
    "eight stages": lambda: make_plan(num_stages=8),
    "forty stages": lambda: make_plan(num_stages=40),
    "large": large_plan,
}


def words(text: str) -> list[str]:
    """Words of a text but for rules of tables; breaks between lines and columns are spaces."""
    return re.sub(r"-{3,}", "", text).split()


@given(WORDS, st.integers(5, 60))
def test_lines_are_short_and_lose_nothing(text: str, width: int) -> None:
    lines = wrapped(text, width)
    longest = max((len(p) for p in re.findall(r"[^\])/.,\s]+[\])/.,]*|[\])/.,]+", text)), default=0)
    assert max(map(len, lines)) <= max(width, longest)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_figures_stay_with_their_units_and_words_whole() -> None:
    text = "peak 43.1 GB, then 12.5 ms of state['params']['layer']['kernel'] (70.5 %)"
    lines = wrapped(text, 24)
    assert lines == ["peak 43.1 GB, then", "12.5 ms of", "state['params']['layer']", "['kernel'] (70.5 %)"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_plans_keep_to_the_width(name: str, width: int) -> None:
    plan = PLANS[name]()
    text = plan_text(plan.content, plan.phases, width)
    assert max(map(len, text.splitlines())) <= width
    # Words are whole: all but paths, which break behind their parts, are words of the text without a limit too.
    unlimited = set(words(plan_text(plan.content, plan.phases, 10**4)))
    known = unlimited | {p for w in unlimited for p in re.findall(r"[^\])/.,]+[\])/.,]*|[\])/.,]+", w)}
    broken = [
        w for w in words(text) if w not in known and not any(w in k and re.search(r"[\])/.,]", w) for k in unlimited)
    ]
    assert broken == []


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_the_command_line_keeps_to_the_width(name: str, width: int) -> None:
    where = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_plan(PLANS[name](), where)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", where.file.getvalue())  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    for section in sections(PLANS[name](), choices=20):
        assert max(map(len, section.text(width).splitlines())) <= width


def test_explanations_keep_to_the_width() -> None:
    plan = large_plan()
    assert max(map(len, explain_text(plan.content, None).splitlines())) <= 120


def test_what_is_cut_says_where_the_rest_is() -> None:
    plan = large_plan()
    several = msgspec.structs.replace(
        plan.content,
        inputs=tuple(
            msgspec.structs.replace(i, path=chr(97 + n // 26) + chr(97 + n % 26))
            for n, i in enumerate(plan.content.inputs)
        ),
    )
    left = len(plan.content.inputs) - 40
    assert f"... {left} more: plan.input_shardings has all" in plan_text(several, ())
    shown = sections(Plan(several), rows=5)[1].text(120)
    assert f"... {len(several.inputs) - 5} more: a page shows them: autopar report" in shown


def test_tables_exchange_rows_and_columns_where_nothing_else_fits() -> None:
    header = ("stage", *(f"figure{n:02}" for n in range(12)))
    rows = [(str(s), *(f"{s}.{n:02} GB" for n in range(12))) for s in range(9)]
    text = table(header, rows, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert all(f"{s}.{n:02} GB" in text for s in range(9) for n in range(12))
    assert text.splitlines()[2].split() == ["figure00", *(f"{s}.00 GB".split()[k] for s in range(5) for k in (0, 1))]


def test_labels_stand_before_their_text() -> None:
    assert labelled([("a", "one two"), ("bcd", "three")], 6, 10) == "a:    one\n      two\nbcd:  three"


@pytest.mark.parametrize(
    ("natural", "missing", "expected"),
    [([10, 10], 1, [9, 10]), ([10, 10], 3, [7, 10]), ([12, 4], 5, [7, 4]), ([12, 4], 10, [4, 2]), ([3, 3], 0, [3, 3])],
)
def test_columns_are_no_narrower_than_they_must_be(natural: list[int], missing: int, expected: list[int]) -> None:
    width = sum(natural) + _GAP * len(natural) - missing
    assert sorted(_fitted(natural, [2] * len(natural), width)) == sorted(expected)
