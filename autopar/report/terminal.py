"""Plans and tables on a terminal, with rich."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan import Plan
from autopar.report.sections import Section, head, sections


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what `print(plan)` shows, as tables that fit the width of ``console``."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in head(plan):
        grid.add_row(Text(label), Text(text))
    console.print(grid)
    for section in sections(plan):
        console.print()
        print_section(section, console)
    if plan.content.notes:
        console.print()
        console.print(Text("notes", style="bold"))
        for note in plan.content.notes:
            console.print(Text(f"  - {note}"))


def print_section(section: Section, console: Console) -> None:
    """Prints one table; a line that says "none" if it has no rows."""
    if not section.rows:
        console.print(Text.assemble((section.title, "bold"), ": none"))
        return
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(section.title, style="bold"), title_justify="left")
    for i, name in enumerate(section.header):
        drawn.add_column(Text(name), justify="right" if i in section.right else "left", overflow="fold")
    for row in section.rows:
        # Text, not str: paths as state['w'][0] look like rich's markup.
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)
    if section.left_out:
        console.print(Text(f"... {section.left_out} more", style="dim"))
    if section.note:
        console.print(Text(section.note, style="dim"))
