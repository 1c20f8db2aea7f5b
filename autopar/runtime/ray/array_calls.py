"""Calls of all workers about arrays: to fetch them, to hold them for a checkpoint, to read them from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autopar.runtime.ray.ledger import Ledger
from autopar.runtime.ray.messages import FileResult, ReadRequest, Snapshot, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.snapshot import SnapshotOnWorkers
from autopar.runtime.ray.steps import lost_array
from autopar.runtime.shards import DamageError, Leaf
from autopar.runtime.transport.tiles import HostKeys, joined, on_host


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
