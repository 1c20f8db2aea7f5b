"""Columns of tables on pages are sorted by what their cells mean, not by their letters."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from autopar.plan.text import bytes_text, seconds_text
from autopar.report import page
from autopar.report.page import plan_page, tables_page
from autopar.report.sections import Section
from tests.report.plans import make_plan
from tests.report.test_page import Page

ORDER = Path(page.__file__).parent / "templates" / "order.js"


def test_a_page_of_tables_has_a_head_for_each_column_and_the_script() -> None:
    rows = tuple((f"plan {n}", seconds_text(n * 1e-3)) for n in range(3))
    source = tables_page("plans <by> degrees", [Section("plans", ("plan", "step time"), rows, (1,))])
    shown = Page(source)
    assert shown.count("th") == 2 and shown.count("tr") == 4 and "plans <by> degrees" in shown.text
    for text in (source, plan_page(make_plan())):
        assert "const sortKey" in text and 'setAttribute("aria-sort"' in text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_figures_are_sorted_by_size_and_words_after_them() -> None:
    r = random.Random(7)
    seconds = sorted(r.uniform(1, 9) * 10 ** r.randint(-9, 3) for _ in range(30))
    sizes = sorted(r.uniform(1, 9) * 10 ** r.randint(0, 14) for _ in range(30))
    columns = [
        [*dict.fromkeys(map(seconds_text, seconds)), "-", "not possible"],
        [*dict.fromkeys(map(bytes_text, sizes)), "-"],
        ["0.5%", "1.0%", "12.5%", "100%"],
        ["2", "10", "1,200", "1e4"],
        ["alpa", "Beam", "tp=2, dp=4", "zero3"],
    ]
    shuffled = [r.sample(column, len(column)) for column in columns]
    script = f"""{ORDER.read_text(encoding="utf-8")}
    const columns = {json.dumps(shuffled)};
    console.log(JSON.stringify(columns.map(c => [...c].sort((a, b) => inOrder(sortKey(a), sortKey(b))))));"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == columns
