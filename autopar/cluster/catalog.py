"""Cluster files by name: those that come with autopar, and the one with figures measured on this machine.

`find` and `read` serve `Cluster.load`; `kept_group` serves `Cluster.local`. `autopar.calibrate(keep=True)` and
``autopar calibrate`` without ``-o`` write the measured figures. Their file holds one number of devices of one kind:
virtual CPU devices share the cores, so eight of them are other devices than four. What a file may say is
`autopar.cluster.file`.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from autopar._compat.devices import FoundDevice, jax_version, machine_name
from autopar._compat.files import cache_root
from autopar.cluster.file import parse
from autopar.cluster.group import NodeGroup
from autopar.errors import ClusterError
from autopar.errors.names import known_names

#: Bytes of a cluster file, and tables inside tables.
_MOST_BYTES, _MOST_DEPTH = 1 << 20, 16
#: Where figures of local devices come from: kept ones where there are any, else the list; the list; measured ones.
Figures = Literal["auto", "list", "measured"]
#: Environment variable with the `Figures` of `Cluster.local` where the call does not name them.
FIGURES_VARIABLE = "AUTOPAR_FIGURES"
_KNOWN: tuple[Figures, ...] = ("auto", "list", "measured")


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


def figures_of(asked: str | None, environment: Mapping[str, str]) -> Figures:
    """The figures that a call or else the environment asks for.

    Raises:
        ClusterError: there are no such figures.
    """
    named = environment.get(FIGURES_VARIABLE, "auto") if asked is None else asked
    for known in _KNOWN:
        if named == known:
            return known
    raise ClusterError(
        f"there are no figures {named!r} of local devices",
        cause=f"figures= or {FIGURES_VARIABLE} is one of {', '.join(_KNOWN)}",
        remedy='"measured" for those of this machine, "list" for those of the cluster file that autopar brings',
    )


def kept_path(environment: Mapping[str, str], devices: Sequence[FoundDevice]) -> Path | None:
    """The file with the figures of devices of one process; None where the environment keeps nothing.

    Args:
        environment: variables; see `cache_root`.
        devices: of one kind.
    """
    root = cache_root(environment)
    if root is None:
        return None
    first = devices[0]
    facts = (first.platform, first.kind, machine_name(first.platform, first.kind), len(devices), jax_version())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return root / "calibrations" / f"{first.platform}-{len(devices)}-{digest}.toml"


def kept_group(environment: Mapping[str, str], devices: Sequence[FoundDevice]) -> NodeGroup | None:
    """The node of devices as it was measured; None where no file holds it.

    A file that is no cluster file is a warning, for a step does not depend on it.
    """
    path = kept_path(environment, devices)
    if path is None or not path.is_file():
        return None
    try:
        _, (group, *_) = parse(read(path), path.name)
    except ClusterError as error:
        warnings.warn(f"{path} is not read: {error}; autopar calibrate writes it again", stacklevel=2)
        return None
    return group if group.devices_per_node == len(devices) else None
