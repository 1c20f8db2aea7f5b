"""The site that `make docs` builds: its pages and its notebooks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, blocks

SITE = ROOT / "docs/site"
LESSONS = [p for p in sorted((ROOT / "docs/tutorial").glob("*.md")) if "```python" in p.read_text(encoding="utf-8")]


def named(entries: Any) -> Iterator[str]:
    """Pages of a navigation, at any depth."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from named(entry)


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((SITE / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert sorted(named(nav)) == sorted(pages)


def test_pages_are_sorted_by_purpose() -> None:
    """Explanation is three pages, measurements are one, whose sections with a table of figures name their date."""
    nav = yaml.safe_load((SITE / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    purposes = {name: pages for entry in nav if isinstance(entry, dict) for name, pages in entry.items()}
    assert list(purposes)[:5] == ["Tutorial", "How to", "Reference", "Explanation", "Measurements"]
    assert purposes["Explanation"] == ["planner.md", "cost-model.md", "run-time.md"]
    assert purposes["Measurements"] == "measurements.md"
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    sections = [s for s in re.split(r"^##+ ", page, flags=re.M)[2:] if re.search(r"^\|.*\d", s, flags=re.M)]
    undated = [s.splitlines()[0] for s in sections if not re.search(r"20\d\d-\d\d-\d\d", s)]
    assert len(sections) > 25 and undated in ([], ["spatial, many_tables, sanity"])


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """A folder with those of all lessons."""
    folder = tmp_path_factory.mktemp("notebooks")
    subprocess.run([sys.executable, str(SITE / "notebooks.py"), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("page", LESSONS, ids=lambda p: p.stem)
def test_a_notebook_has_the_code_of_its_lesson(page, notebooks) -> None:
    notebook = json.loads((notebooks / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code[1:] == [b.text.strip("\n") for b in blocks(page) if b.language == "python"]
    assert [cell["cell_type"] for cell in notebook["cells"]].count("markdown") >= len(code) - 1
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.slow
def test_a_notebook_runs_on_a_machine_with_one_device(tmp_path) -> None:
    """The first cell makes eight of it; the environment of the tests is left out."""
    spec = importlib.util.spec_from_file_location("notebooks", SITE / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cells = module.notebook((ROOT / "docs/tutorial/hosts.md").read_text(encoding="utf-8"))["cells"]
    setup = (
        "import jax.numpy as jnp\n"
        "def train_step(w, x):\n    return w - 0.1 * jax.grad(lambda w: jnp.mean((x['x'] @ w) ** 2))(w), {}\n"
        "def train_step_args():\n    return jnp.ones((8, 4)), {'x': jnp.ones((16, 8))}\n"
        "state, batch = train_step_args()\nbatches = [batch]\nimport autopar\n"
    )
    first, *code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    program = "\n".join([first, setup, *code, "assert len(jax.devices()) == 8"])
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE_DIR": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
