"""Hooks of `mkdocs build`: links that leave the documentation, to files of the repository, become the files' names."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([A-Z][\w-]*\.md|LICENSE)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page's text, as mkdocs is given it."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
