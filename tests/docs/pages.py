"""Pages of the documentation, and what they say that can be checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if p.name not in ("CHANGELOG.md", "coverage.md")
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: file, relative to the root.
        line: of the opening fence.
        language: after the fence; "" where there is none.
        text: what it holds.
        mark: text of an HTML comment on the line above the fence; "" where there is none.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str


def name(page: Path) -> str:
    """A page relative to the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for n, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = n
            continue
        before = next((text for text in reversed(lines[:start]) if text.strip()), "")
        mark = re.fullmatch(r"<!-- (.*) -->", before)
        text = "\n".join(lines[start + 1 : n]) + "\n"
        yield Block(name(page), start + 1, lines[start][3:].strip(), text, mark[1] if mark else "")
        start = None
    assert start is None, f"{name(page)}:{start}: a block that does not end"


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Inline code of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def command_lines(page: Path) -> list[list[str]]:
    """Commands in blocks without a language and in inline code, as words; what is no shell word is left out."""
    lines = [line for block in blocks(page) if block.language in ("", "sh") for line in block.text.splitlines()]
    commands = []
    for line in [*lines, *spans(page)]:
        text = line.partition(" #")[0].strip().removeprefix("$ ")
        if text.split(" ")[0] not in ("autopar", "make", "pytest", "python"):
            continue
        try:
            commands.append(shlex.split(text.replace("\\|", "|")))
        except ValueError:
            continue
    return commands


def anchors(page: Path) -> set[str]:
    """Names that headings of a page have in links."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in headings}


def links(page: Path) -> list[str]:
    """Targets of links inside the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [t for t in targets if not re.match(r"[a-z]+:", t)]
