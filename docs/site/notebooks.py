"""The tutorial's lessons as Jupyter notebooks: text and code blocks of a page become cells.

`make docs` writes them to build/notebooks; `python docs/site/notebooks.py FOLDER` writes them elsewhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LESSONS = Path(__file__).resolve().parents[1] / "tutorial"

#: What a notebook needs before a lesson: eight devices on any machine.
FIRST = 'import jax\n\njax.config.update("jax_num_cpu_devices", 8)  # before anything else of jax\n'


def cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a page: "code" for blocks of Python, "markdown" for all between them."""
    parts: list[tuple[str, str]] = []
    lines: list[str] = []
    kind = "markdown"

    def close(following: str) -> None:
        nonlocal kind
        source = "\n".join(lines).strip("\n")
        if source:
            parts.append((kind, source))
        lines.clear()
        kind = following

    for line in text.splitlines():
        if kind == "markdown" and line == "```python":
            close("code")
        elif kind == "code" and line == "```":
            close("markdown")
        else:
            lines.append(line)
    close("markdown")
    return parts


def notebook(text: str) -> dict[str, Any]:
    """A page as a notebook of format 4.5."""
    sources = [("code", FIRST), *cells(text)]
    empty: dict[str, Any] = {"execution_count": None, "outputs": []}
    return {
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{n}",
                "metadata": {},
                "source": source,
                **(empty if kind == "code" else {}),
            }
            for n, (kind, source) in enumerate(sources)
        ],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main(folder: Path) -> None:
    """Writes the notebook of each lesson into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(LESSONS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if "```python" in text:
            (folder / f"{page.stem}.ipynb").write_text(json.dumps(notebook(text), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
