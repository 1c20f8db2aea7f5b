"""`SnapshotOnWorkers`: arrays of workers on their way into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.runtime.ray.messages import FileResult, decode
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.values import Writing
from autopar.runtime.shards import Written, merged, write_shards
from autopar.runtime.transport.tiles import tiled_host


@dataclass(frozen=True, eq=False)
class SnapshotOnWorkers(Writing):
    """Arrays that workers keep for a checkpoint.

    Args:
        session: the processes that have them.
        ticket: under which number.
        copies: by name those that the driver alone has, on the host.
        limit_s: seconds that writing may take.
    """

    session: Session
    ticket: int
    copies: Mapping[str, Any]
    limit_s: float

    def write(self, folder: Path, label: str) -> dict[str, list[Written]]:
        """See `Writing.write`."""
        count = self.session.groups.num_processes
        paths = [str((folder / f"{label}-process-{p:04d}.bin").absolute()) for p in range(count)]
        results = [
            decode(a, FileResult) for a in self.session.call("write", [(self.ticket, p) for p in paths], self.limit_s)
        ]
        failed = next((t for t in results if t.error), None)
        if failed is not None:
            raise OSError(failed.error)
        written = [t.written for t in results]
        if self.copies:
            tiles = ((n, tiled_host(a)) for n, a in sorted(self.copies.items()))
            written.append(write_shards(folder / f"{label}-driver.bin", tiles))
        return merged(written)
