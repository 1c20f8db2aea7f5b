"""Metadata hook of hatchling: the README as a description that is read outside of the repository.

Links to files of the repository lead nowhere on another page. With ``AUTOPAR_HOME`` (the address of the repository's
files, such as ``https://example.org/autopar/blob/v0.2.0``) they become absolute, and the project has its addresses;
without it their text stays, with the name of the file where the text is another.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HOME_VARIABLE = "AUTOPAR_HOME"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def description(readme: str, home: str = "") -> str:
    """The README with links that work anywhere.

    Args:
        readme: its text.
        home: address of the repository's files; "" where no home is known.
    """

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if home:
            return f"{image}[{text}]({home.rstrip('/')}/{target})"
        return text if image or target.partition("#")[0].endswith(text) else f"{text} ({target})"

    return _LINK.sub(link, readme)


class DescriptionHook(MetadataHookInterface):
    """Sets the description and, with a home, the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See `MetadataHookInterface.update`."""
        home = os.environ.get(HOME_VARIABLE, "")
        text = description((Path(self.root) / "README.md").read_text(encoding="utf-8"), home)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if home:
            pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs/index.md", "Source": ""}
            metadata["urls"] = {name: f"{home.rstrip('/')}/{page}".rstrip("/") for name, page in pages.items()}
        else:
            metadata["urls"] = {}
