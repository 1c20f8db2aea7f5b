"""Plain text that keeps to a width: paragraphs, labelled lines and tables, without a break inside of words.

Lines break at spaces, and paths after ``]``, ``)``, ``/``, ``.`` and ``,``; a figure and its unit stay together. A
part of a path that is longer than the width by itself is left whole.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Final

#: Columns where the text is for no terminal.
USUAL_COLUMNS: Final = 120
#: Least columns of a terminal that text is fitted to.
LEAST_COLUMNS: Final = 40
_GAP: Final = 2
_FIGURE: Final = re.compile(r"(?<=\d) (?=[A-Za-z%]+(?:$|[\s,;)/]))")
_PART: Final = re.compile(r"[^\])/.,]+[\])/.,]*|[\])/.,]+")
_LABEL: Final = re.compile(r" +[a-z -]+: +")
_FIXED: Final = "\N{NO-BREAK SPACE}"


def columns() -> int:
    """Columns of the terminal that standard output is, elsewhere those of COLUMNS or `USUAL_COLUMNS`."""
    try:
        is_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):
        is_terminal = False
    if not is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        return USUAL_COLUMNS
    return max(LEAST_COLUMNS, shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns)


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` characters, as far as its words let it; one line at least."""
    lines, line = [], ""
    for word in _FIGURE.sub(_FIXED, text).split(" "):
        if not line or len(line) + 1 + len(word) <= width:
            line = f"{line} {word}" if line else word
        else:
            lines.append(line)
            line = word
        if len(line) > width:
            *whole, line = _in_parts(line, width)
            lines += whole
    return [part.replace(_FIXED, " ") for part in (*lines, line)]


def _in_parts(line: str, width: int) -> Iterator[str]:
    """A line that is too long, broken where words of a path end."""
    shown = ""
    for part in _PART.findall(line):
        if shown and len(shown) + len(part) > width:
            yield shown
            shown = part
        else:
            shown += part
    yield shown


def hanging(text: str, width: int) -> str:
    """Lines that keep to a width: the rest of a long one stands below its text, after its indent and its label.

    Args:
        text: of lines such as ``  label:      text``.
        width: most characters of a line.
    """
    return "\n".join(part for line in text.splitlines() for part in _hung(line, width))


def _hung(line: str, width: int) -> list[str]:
    label = _LABEL.match(line)
    indent = len(label[0]) if label else len(line) - len(line.lstrip())
    first, *rest = wrapped(line[indent:], width - indent)
    return [line[:indent] + first, *(" " * indent + text for text in rest)]


def labelled(rows: Sequence[tuple[str, str]], label_width: int, width: int) -> str:
    """``label:   text`` for each row, later lines below the text."""
    lines = []
    for label, text in rows:
        first, *rest = wrapped(text, width - label_width)
        lines += [f"{label + ':':<{label_width}}{first}", *(" " * label_width + line for line in rest)]
    return "\n".join(lines)


def bullets(lines: Sequence[str], width: int) -> str:
    """``- text`` for each line, indented."""
    return "\n".join("  - " + "\n    ".join(wrapped(line, width - 4)) for line in lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns, indented; the last one is not padded.

    Where the columns are too wide their cells take several lines. Where even their longest words do not fit next to
    each other, rows become columns, in as many tables as the width wants.

    Args:
        header: names of the columns.
        rows: a text for each column.
        width: most characters of a line; None for those of the terminal.
    """
    width = columns() if width is None else width
    lines = [tuple(header), *map(tuple, rows)]
    least = [max(_least(line[i]) for line in lines) for i in range(len(header))]
    if rows and len(header) > 2 and sum(least) + _GAP * len(header) > width:
        return _exchanged(header, rows, width)
    return _drawn(
        header, rows, _fitted([max(len(line[i]) for line in lines) for i in range(len(header))], least, width)
    )


def _least(cell: str) -> int:
    """The longest part of a cell that no line breaks."""
    return max((len(p) for word in _FIGURE.sub(_FIXED, cell).split(" ") for p in _PART.findall(word)), default=0)


def _fitted(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Widths of columns: as wide as their cells, the widest made narrower until all fit."""
    fitted = list(natural)
    excess = sum(fitted) + _GAP * len(fitted) - width
    while excess > 0:
        free = [i for i in range(len(fitted)) if fitted[i] > least[i]]
        if not free:
            break
        widest = max(free, key=lambda i: (fitted[i], -i))
        others = [fitted[i] for i in free if fitted[i] < fitted[widest]]
        target = max([least[widest], *others, fitted[widest] - excess])
        target = min(target, fitted[widest] - 1)
        excess -= fitted[widest] - target
        fitted[widest] = target
    return fitted


def _drawn(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    text = []
    for n, cells in enumerate([header, *rows]):
        parts = [wrapped(cell, w) for cell, w in zip(cells, widths, strict=True)]
        for at in range(max(map(len, parts))):
            shown = [part[at] if at < len(part) else "" for part in parts]
            text.append("  ".join(cell.ljust(w) for cell, w in zip(shown, widths, strict=True)).rstrip())
        if n == 0:
            text.append("  ".join("-" * w for w in widths))
    return "\n".join("  " + line if line else line for line in text)


def _exchanged(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table whose columns are the rows, in as many tables as the width wants."""
    head, names = header[0], list(header[1:])
    first = max(map(len, (head, *names)))
    tables, shown = list[str](), list[Sequence[str]]()
    taken = first + _GAP
    for row in rows:
        needed = _GAP + max(map(len, row))
        if shown and taken + needed > width:
            tables.append(_transposed(head, names, shown, width))
            shown, taken = [], first + _GAP
        shown.append(row)
        taken += needed
    return "\n".join([*tables, _transposed(head, names, shown, width)])


def _transposed(head: str, names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    cells = [[name, *(row[1 + n] for row in rows)] for n, name in enumerate(names)]
    lines = [[head, *(row[0] for row in rows)], *cells]
    natural, least = (
        [max(measure(line[i]) for line in lines) for i in range(len(rows) + 1)] for measure in (len, _least)
    )
    return _drawn(lines[0], cells, _fitted(natural, least, width))
