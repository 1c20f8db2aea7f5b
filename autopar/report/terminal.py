"""Plans and tables on a terminal: their plain text in its width, titles in bold."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autopar.plan import Plan
from autopar.plan.columns import bullets, labelled
from autopar.report.sections import Section, head, sections


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what `print(plan)` shows, in the width of ``console``."""
    rows = head(plan)
    label_width = 2 + max(len(label) for label, _ in rows)
    text = Text(labelled(rows, label_width, console.width))
    for label, _ in rows:
        text.highlight_words([f"{label}:"], "bold")
    _print(text, console)
    for section in sections(plan):
        console.print()
        print_section(section, console)
    if plan.content.notes:
        console.print()
        _print(Text.assemble(("notes\n", "bold"), bullets(plan.content.notes, console.width)), console)


def print_section(section: Section, console: Console) -> None:
    """Prints one table; a line that says "none" if it has no rows."""
    text = section.text(console.width)
    _print(Text.assemble((section.title, "bold"), text.removeprefix(section.title)), console)


def _print(text: Text, console: Console) -> None:
    console.print(text, soft_wrap=True)
