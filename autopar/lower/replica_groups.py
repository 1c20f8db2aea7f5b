"""Groups of collectives that XLA writes by axes of a mesh, written out as lists of devices.

``replica_groups=mesh['a'=2,'b'=4] {'b'}`` becomes ``replica_groups={{0,1,2,3},{4,5,6,7}}``. A part of an axis,
``'b':(2)2``, is the dim of size 2 behind one of size 2 (its first number) in that axis. The devices of a mesh
may be in another order: ``device_ids=([2,4]T(1,0))`` is a transposed count, ``device_ids=(3,2,1,0)`` a list.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np

_FORM = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, *device_ids=\((?:\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,\s]+))\))?"
    r" *\{(?P<chosen>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def listed_groups(text: str) -> str:
    """``text``, optimized HLO, with all such groups as lists."""
    return _FORM.sub(_listed, text)


def _listed(match: re.Match[str]) -> str:
    sizes = {name: int(n) for name, n in _AXIS.findall(match["axes"])}
    # Each axis as dims of the device array: before, the part, behind it.
    cuts: dict[str, set[int]] = {name: {1, n} for name, n in sizes.items()}
    wanted: list[tuple[str, int, int]] = []
    for name, before, part in _PART.findall(match["chosen"]):
        start = int(before or 1)
        stop = start * int(part or sizes[name])
        cuts[name] |= {start, stop}
        wanted.append((name, start, stop))
    dims: list[int] = []
    labels: list[tuple[str, int]] = []
    for name, points in cuts.items():
        ordered = sorted(points)
        for low, high in itertools.pairwise(ordered):
            labels.append((name, low))
            dims.append(high // low)
    matching = [i for w in wanted for i, (name, low) in enumerate(labels) if name == w[0] and w[1] <= low < w[2]]
    kept = [i for i in range(len(dims)) if i not in matching]
    numbers = _devices(match, math.prod(dims)).reshape(dims).transpose((*kept, *matching))
    groups = numbers.reshape(-1, math.prod(dims[i] for i in matching))
    return "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups.tolist()) + "}"


def _devices(match: re.Match[str], count: int) -> np.ndarray[Any, Any]:
    """Numbers of a mesh's devices, in its order."""
    if match["ids"]:
        return np.array([int(n) for n in match["ids"].split(",")])
    numbers = np.arange(count)
    if match["shape"]:
        numbers = numbers.reshape([int(n) for n in match["shape"].split(",")])
        if match["order"]:
            numbers = numbers.transpose([int(n) for n in match["order"].split(",")])
    return numbers.reshape(-1)
