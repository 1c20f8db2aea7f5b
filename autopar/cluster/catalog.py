"""The cluster files that come with autopar, by name."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.errors.names import known_names

#: Bytes of a cluster file, and tables inside tables.
_MOST_BYTES, _MOST_DEPTH = 1 << 20, 16


def folder() -> Path:
    """A wheel carries the files inside the package; an editable install has them next to it."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_cost_models"
    return packaged if packaged.is_dir() else package.parent / "cost_models"


def available() -> tuple[str, ...]:
    """Names that `Cluster.load` knows, sorted."""
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a cluster: a path if it ends in ``.toml`` or has a separator, else a name of `available`.

    Raises:
        ClusterError: there is no such file or name; it lists the names and suggests the closest.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text or isinstance(name_or_path, os.PathLike):
        path = Path(text)
        if not path.is_file():
            raise ClusterError(
                f"there is no cluster file {text!r}",
                remedy=f"give a path to a TOML file, or one of the names {', '.join(available())}",
            )
        return path
    names = available()
    if text in names:
        return folder() / f"{text}.toml"
    raise ClusterError(
        f"there is no cluster called {text!r}",
        cause="a name stands for a file that comes with autopar; a path must end in .toml",
        remedy=known_names(text.lower(), names),
    )


def read(path: Path) -> dict[str, Any]:
    """The plain form in a TOML file; ClusterError if it cannot be read as TOML."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode("utf-8")
        _check_size(text, path.name)
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise ClusterError(
            f"{path.name} cannot be read as TOML: {error}", remedy="correct the file at that place"
        ) from error


def _check_size(text: str, name: str) -> None:
    """Raises ClusterError where a file is larger or nested deeper than a cluster's, for which TOML takes very long."""
    if len(text) > _MOST_BYTES:
        raise ClusterError(f"{name} has more than {_MOST_BYTES} bytes", cause="it is no cluster file")
    depth = deepest = 0
    for line in text.splitlines():
        deepest = max(deepest, line.partition("=")[0].count("."))
        for c in line.partition("#")[0]:
            depth += (c in "[{") - (c in "]}")
            deepest = max(deepest, depth)
    if deepest > _MOST_DEPTH:
        raise ClusterError(f"{name} is nested deeper than {_MOST_DEPTH} tables", cause="it is no cluster file")
