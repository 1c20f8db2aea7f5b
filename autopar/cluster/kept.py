"""Figures of the devices of this machine that were measured before, in a file that the machine keeps.

`autopar.calibrate(keep=True)` and ``autopar calibrate`` without ``-o`` write it; `Cluster.local` reads it. A file holds
one number of devices of one kind: virtual CPU devices share the cores, so eight of them are other devices than four.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from autopar._compat.devices import FoundDevice, jax_version, machine_name
from autopar._compat.files import cache_root
from autopar.cluster.catalog import read
from autopar.cluster.file import parse
from autopar.cluster.group import NodeGroup
from autopar.errors import ClusterError

#: Where figures of local devices come from: kept ones where there are any, else the list; the list; measured ones.
Figures = Literal["auto", "list", "measured"]
#: Environment variable with the `Figures` of `Cluster.local` where the call does not name them.
FIGURES_VARIABLE = "AUTOPAR_FIGURES"
_KNOWN: tuple[Figures, ...] = ("auto", "list", "measured")


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
