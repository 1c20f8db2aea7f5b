"""The listing of the user's lines that choices of a plan come from, and the links to it."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.plan.details import Details
from autopar.report.sections import Section

#: Title of the listing.
LISTING = "source lines"

_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+)\b")


def with_source_lines(
    sections: Sequence[Section], details: Details, folders: Sequence[Path] = ()
) -> tuple[Section, ...]:
    """Sections whose rows are linked to the lines that they come from, with a listing of these lines behind them.

    What a row's operator computes, with its shapes, is shown where a pointer is over the row's name. A line's text is
    there where its file is one of this process, or in one of ``folders``.

    Args:
        sections: of a page.
        details: of its plan.
        folders: where files may be that this process did not load.
    """
    known = {d.id: d for d in details.operators}
    lines: dict[str, list[str]] = {}
    linked = []
    for s in sections:
        if "line" not in s.header:
            linked.append(s)
            continue
        at = s.header.index("line")
        for row in s.rows:
            if row[at]:
                lines.setdefault(row[at], []).append(row[0])
        anchors = {line: f"line-{n}" for n, line in enumerate(lines)}
        targets = tuple(anchors.get(row[at], "") for row in s.rows)
        hover = tuple(known[row[0]].form if row[0] in known else "" for row in s.rows)
        linked.append(replace(s, link_column=at, targets=targets, hover=hover))
    if not lines:
        return tuple(linked)
    rows = tuple((line, text_of(line, folders), ", ".join(names)) for line, names in lines.items())
    ids = tuple(f"line-{n}" for n in range(len(rows)))
    return (*linked, Section(LISTING, ("line", "text", "choices"), rows, ids=ids))


def text_of(place: str, folders: Sequence[Path] = ()) -> str:
    """The text of a line given as ``file.py:12:8 (function)``; "" where its file is not found, or several are.

    Plans name files without their folders; a module of this process says where one lies, or else it is in ``folders``.
    """
    place_match = _PLACE.match(place.rpartition(", from ")[2])
    if not place_match:
        return ""
    files = {getattr(m, "__file__", None) or "" for m in tuple(sys.modules.values())}
    here = [file for file in files if Path(file).name == place_match["file"]]
    if not here:
        here = sorted({str(f.resolve()) for folder in folders if (f := folder / place_match["file"]).is_file()})
    return linecache.getline(here[0], int(place_match["line"])).strip() if len(here) == 1 else ""
