"""Modules of packages that users need not have installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autopar.errors.base import AutoparError


def optional_module(name: str, package: str, missing: AutoparError) -> Any:
    """A module that imports an optional package.

    Args:
        name: of the module.
        package: top-level name of the package.
        missing: the error where the package is not installed; without another module the import fails as it does.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise missing from error
