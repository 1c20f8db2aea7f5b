"""Build hook of hatchling: an editable install copies nothing into the environment.

In a wheel cluster files and examples lie inside the package. In an editable install such copies would be a folder
``autopar`` without ``__init__.py``, which Python takes for the package before it asks for the checkout.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableHook(BuildHookInterface):
    """Leaves the files that are only in wheels out of editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Replaces the files to include; an empty mapping would mean those of pyproject.toml."""
        if version == "editable":
            build_data["force_include_editable"] = {"requirements/editable.py": "_editable_autopar_hook.py"}
