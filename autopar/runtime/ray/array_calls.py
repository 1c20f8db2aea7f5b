"""Calls of all workers about arrays: to fetch them, to hold them for a checkpoint, to read them from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.runtime.ray.ledger import Ledger
from autopar.runtime.ray.messages import FileResult, ReadRequest, Snapshot, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.steps import lost_array
from autopar.runtime.ray.values import Writing
from autopar.runtime.shards import DamageError, Leaf, Written, merged, write_shards
from autopar.runtime.transport.tiles import HostKeys, joined, on_host, tiled_host


def fetch_arrays(session: Session, ledger: Ledger, ids: Iterable[int], options: RunOptions) -> dict[int, Any]:
    """Copies of arrays on the host, by number.

    Args:
        session: the workers.
        ledger: where arrays lie.
        ids: numbers of the arrays.
        options: see `RunOptions`.

    Raises:
        AutoparError: one is nowhere.
        WorkerLostError: workers were lost.
    """
    arrays: dict[int, Any] = {}
    wanted: list[list[int]] = [[] for _ in range(session.groups.num_workers)]
    for id in ids:
        held = ledger.holders.get(id)
        if held:
            wanted[min(held)].append(id)
        elif id in ledger.copies:
            arrays[id] = ledger.copies[id]
        else:
            raise lost_array()
    if any(wanted):
        answers = session.of_workers("get", [(w,) for w in wanted], options.deadline_s)
        for wanted_of_worker, parts in zip(wanted, answers, strict=True):
            arrays.update({id: on_host(joined([p[id] for p in parts])) for id in wanted_of_worker})
    return arrays


def host_bytes(array: Any) -> int:
    """Bytes of an array on the host."""
    data = array.data if isinstance(array, HostKeys) else array
    return int(data.nbytes)


def hold_arrays(session: Session, ledger: Ledger, names: Mapping[int, str], options: RunOptions) -> SnapshotOnWorkers:
    """Has workers hold arrays for a checkpoint; see `fetch_arrays`.

    Args:
        session: the workers.
        ledger: where arrays lie.
        names: by number what each array is called in the checkpoint.
        options: see `RunOptions`.
    """
    names_of_workers: list[dict[int, str]] = [{} for _ in range(session.groups.num_workers)]
    copies: dict[str, Any] = {}
    for id, name in sorted(names.items()):
        held = ledger.holders.get(id)
        if held:
            # The one that has least to write.
            names_of_workers[min(held, key=lambda w: (len(names_of_workers[w]), w))][id] = name
        else:
            copies[name] = fetch_arrays(session, ledger, [id], options)[id]
    ticket = ledger.new_id()
    session.of_workers("hold", [(encode(Snapshot(ticket, n)),) for n in names_of_workers], options.deadline_s)
    return SnapshotOnWorkers(session, ticket, copies, options.load_s)


def read_arrays(
    session: Session, ledger: Ledger, folder: Path, leaves: Mapping[int, Leaf], options: RunOptions
) -> dict[int, int]:
    """Has workers read arrays of a checkpoint; numbers of the new arrays.

    Args:
        session: the workers.
        ledger: where arrays lie; told where the new ones do.
        folder: of the checkpoint.
        leaves: by number of an array that lies where the new one is to lie.
        options: see `RunOptions`.

    Raises:
        DamageError: a file is not what was written.
        WorkerLostError: workers were lost.
    """
    requests = [ReadRequest(str(folder.absolute()), {}, {}) for _ in range(session.groups.num_workers)]
    ids = {like: ledger.new_id() for like in sorted(leaves)}
    for like, id in ids.items():
        for worker in sorted(ledger.holders.get(like, (0,))):
            requests[worker].leaves[id] = leaves[like]
            requests[worker].like[id] = like
    answers = session.of_workers("read", [(encode(w),) for w in requests], options.load_s)
    for result in (decode(a, FileResult) for some in answers for a in some):
        if result.error:
            raise DamageError(result.file, result.error)
    for like, id in ids.items():
        ledger.held_by([id], ledger.holders.get(like, (0,)))
    return ids


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
