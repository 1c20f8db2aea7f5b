"""Numbers of devices that the workers of a pipeline may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.search.partition.submesh import submeshes

#: Workers up to which each number is looked at for itself; above they are taken together up to the next power of two.
_EACH = 16


@dataclass(frozen=True)
class Workers:
    """Numbers of workers, and of the devices that each may have.

    Args:
        most: workers.
        least_devices, most_devices: of any of them.
    """

    most: int
    least_devices: int
    most_devices: int


def workers_of(cluster: Cluster, most: int) -> Iterator[Workers]:
    """All ways to deal the devices out to between one worker and ``most``.

    A stage has one of the submeshes of `autopar.search.partition.submesh`, or an even share of the devices. Large
    numbers of workers are taken together: what is said of them holds for each.

    Args:
        cluster: all devices.
        most: workers, no more than there are devices.
    """
    devices = cluster.num_devices
    sizes = sorted({m.size for m in submeshes(cluster)})
    sums = [1]  # by number of workers, the numbers of devices that they can have together, as bits
    for _ in range(min(most, _EACH)):
        together = 0
        for size in sizes:
            together |= sums[-1] << size
        sums.append(together & ((1 << (devices + 1)) - 1))
    number = 1
    while number <= most:
        if number <= _EACH:
            usable = {s for s in sizes if s <= devices and sums[number - 1] >> (devices - s) & 1}
            if devices % number == 0:
                usable.add(devices // number)
            if usable:
                yield Workers(number, min(usable), max(usable))
            number += 1
            continue
        last = min(most, 2 * number - 1)
        share = {devices // n for n in range(number, last + 1) if devices % n == 0}
        some = {s for s in sizes if s <= devices - number + 1} | share
        yield Workers(last, 1 if number < devices else min(some), max(some) if number < devices else 1)
        number = last + 1
