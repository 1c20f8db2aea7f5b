"""`Checkpoints`: states of a training on disk, whole or not at all, for any plan and number of stages.

A checkpoint is a folder with files of raw numbers and a ``checkpoint.json`` that says which piece of which leaf lies
where in them, with checksums. What lies on workers is written by them at the same time, each process what it has
(`autopar.runtime.shards`); the list is written last, and the folder gets its name when all of it is on disk. Any part
of a leaf can be read back, so that a checkpoint can be placed as any plan wants. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import msgspec
import numpy as np

from autopar._compat.files import write_private
from autopar.errors import CheckpointError, WorkerLostError
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.pipeline import to_host
from autopar.runtime.ray.values import ArrayOwner, RemoteArray, RemoteStack, Writing
from autopar.runtime.shards import (
    DamageError,
    Leaf,
    check_leaves,
    leaf_of,
    open_plain,
    read_whole,
    stacked,
    write_shards,
)
from autopar.runtime.transport.tiles import HostKeys, from_host, tiled_host

_FORMAT = 2
_NAME = re.compile(r"step-(\d+)")
_LIST = "checkpoint.json"
#: Of a list of pieces: what is longer is cut off, and no JSON.
_MOST_LIST_BYTES = 1 << 30
#: How often a checkpoint is begun when workers are lost while they write it.
_ATTEMPTS = 5
#: What is written, and what was replaced but is not removed yet: .NAME.RANDOM.part, .NAME.RANDOM.old
_REMAINS = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>part|old)")
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    step: int
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, eq=False)
class _Saving:
    """A checkpoint that is asked for: its step, and its leaves by path."""

    step: int
    leaves: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class _ShardSources:
    """Sources of the numbers of a checkpoint.

    Args:
        names: by path the names of the parts of a leaf, in order; one where it is no stack.
        local: by name what is on the host.
        remote: what is on workers.
    """

    names: Mapping[str, tuple[str, ...]]
    local: Mapping[str, Any]
    remote: tuple[Writing, ...]


class Checkpoints:
    """The checkpoints of one training.

    Args:
        folder: where they are; made if it is not there.
        keep: how many are kept; older ones are removed after one was written. None keeps all.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(
                f"keep={keep!r} is not a number of checkpoints", remedy="give 1 or more, or None for all"
            )
        self.folder = Path(folder)
        self.keep = keep
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[None] | None = None
        self._saving: _Saving | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with a checkpoint, ascending; those that were not finished do not count."""
        mend(self.folder)
        names = [_NAME.fullmatch(p.name) for p in self.folder.glob("step-*")]
        return tuple(sorted(int(m[1]) for m in names if m is not None))

    def save(self, step: int, state: Any, *, wait: bool = True) -> None:
        """Writes a checkpoint.

        Args:
            step: its number; one that is there already is replaced.
            state: a pytree of arrays, on this process's devices or on workers. What is on workers they write
                themselves: the folder has to be one that all machines share.
            wait: whether to return when it is on disk; else its leaves are kept as they are now and written meanwhile,
                and what goes wrong is raised by the next call of `save` or `wait`.

        Raises:
            CheckpointError: it cannot be written, as on a full disk; older ones are as they were.
        """
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise CheckpointError(f"step={step!r} is not a step number", remedy="give 0 or more")
        step = int(step)
        named = ((jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_flatten_with_path(state)[0])
        # What is here is copied: its memory may be used again.
        leaves = tuple(
            (path, leaf if _is_remote(leaf) and not _is_on_driver(leaf) else _host(leaf)) for path, leaf in named
        )
        self._begin(_Saving(step, leaves))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved is on disk. Raises CheckpointError where it is not."""
        for attempt in range(_ATTEMPTS):
            saving, self._saving = self._saving, None
            if saving is None:
                return
            writing, self._writing = self._writing, None
            try:
                if writing is not None:
                    writing.result()
                return
            except WorkerLostError as error:
                # Where lost workers are replaced their arrays are there again, bit by bit.
                if attempt == _ATTEMPTS - 1:
                    raise _unwritten(saving.step, error) from error
                self._begin(saving)

    @contextlib.contextmanager
    def preemption(
        self, kind: signal.Signals = signal.SIGTERM, cluster: RayCluster | None = None
    ) -> Iterator[Callable[[], bool]]:
        """Has a training end by itself when the process is told to: ``with checkpoints.preemption() as told:``.

        What it gives says whether the process was told to end. The training asks after each step, saves and leaves;
        then it exits as it will, or with `sys.exit(143)`. Outside of it the signal does what it did before.

        Args:
            kind: of the signal.
            cluster: whose workers count too: a worker that gets SIGTERM goes on for 25 s, in which to save.
        """
        ending = threading.Event()
        before = signal.signal(kind, lambda number, frame: ending.set())
        try:
            yield lambda: ending.is_set() or (cluster is not None and cluster.workers.is_ending)
        finally:
            signal.signal(kind, before)
            self.wait()

    def _begin(self, saving: _Saving) -> None:
        try:
            parts = _parts(saving.leaves)
        except WorkerLostError as error:
            raise _unwritten(saving.step, error) from error
        self._saving = saving
        self._writing = self._thread.submit(self._write, saving.step, parts)

    def restore(self, like: Any, step: int | None = None) -> Any:
        """The state of a checkpoint.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of its structure. Where a leaf has a sharding of this
                process's devices the array lies so; where it is on workers they read it, each process what it is to
                have; else it is a numpy array for `ParallelFunction.shard`.
            step: which; None takes the last.

        Raises:
            CheckpointError: there is none, it is of another structure, or its files are not what was written.
        """
        self.wait()
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{self.folder} has no checkpoint{'' if step is None else f' of step {step}'}",
                cause=f"there are those of steps {', '.join(map(str, steps))}" if steps else "none was finished",
                remedy="give another folder or step",
            )
        folder = self.folder / _folder(steps[-1] if step is None else step)
        content = _content(folder)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(like)
        wanted = {jax.tree_util.keystr(p): x for p, x in with_paths}
        leaves_by_path = {leaf.path: leaf for leaf in content.leaves}
        if wanted.keys() != leaves_by_path.keys():
            path = min(wanted.keys() ^ leaves_by_path.keys())
            raise CheckpointError(
                f"{folder} is of another structure: {path} is {'not there' if path in wanted else 'only there'}",
                remedy="restore it with the state that it was made from",
            )
        try:
            remote = _read_remote(folder, {p: (leaves_by_path[p], x) for p, x in wanted.items() if _is_remote(x)})
            leaves = [remote[p] if p in remote else _read(folder, leaves_by_path[p], x) for p, x in wanted.items()]
        except DamageError as error:
            raise _damaged(folder / error.file, error) from error
        return jax.tree.unflatten(treedef, leaves)

    def _write(self, step: int, parts: _ShardSources) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_remains(self.folder)
            with Save(self.folder, _folder(step)) as save:
                content = _Content(_FORMAT, step, tuple(_written(save.part, parts)))
                text = msgspec.json.format(msgspec.json.encode(content), indent=1)
                write_private(save.part / _LIST, text, sync=True)
                save.finish()
        except (OSError, ValueError) as error:
            raise _unwritten(step, error) from error
        for old_step in self.steps[: -self.keep] if self.keep else ():
            with contextlib.suppress(OSError):
                discard(self.folder, _folder(old_step))


def _is_remote(leaf: Any) -> bool:
    """Whether workers have a leaf."""
    shards = leaf.shards if isinstance(leaf, RemoteStack) else [leaf]
    return all(isinstance(p, RemoteArray) and p.owner.has(p.id) for p in shards)


def _is_on_driver(leaf: Any) -> bool:
    """Whether the numbers of a leaf are here already."""
    return isinstance(leaf, RemoteArray) and leaf.is_on_driver


def _parts(leaves: Sequence[tuple[str, Any]]) -> _ShardSources:
    """Parts to write; they stay unchanged from now on."""
    names: dict[str, tuple[str, ...]] = {}
    local: dict[str, Any] = {}
    owners: list[tuple[ArrayOwner, dict[int, str]]] = []
    for number, (path, leaf) in enumerate(leaves):
        shards = leaf.shards if isinstance(leaf, RemoteStack) else [leaf]
        names[path] = tuple(f"{number}.{k}" for k in range(len(shards)))
        for name, piece in zip(names[path], shards, strict=True):
            if not isinstance(piece, RemoteArray):
                local[name] = piece
                continue
            owner = next((ids for owner, ids in owners if owner is piece.owner), None)
            if owner is None:
                owner = {}
                owners.append((piece.owner, owner))
            if piece.id in owner:  # the same array twice in a tree
                local[name] = piece.host
            owner.setdefault(piece.id, name)
    return _ShardSources(names, local, tuple(owner.hold(ids) for owner, ids in owners))


def _written(folder: Path, parts: _ShardSources) -> Iterable[Leaf]:
    """Writes everything; the leaves."""
    by_leaf: dict[str, list[Leaf]] = {}
    for number, writing in enumerate(parts.remote):
        by_leaf.update(writing.write(folder, f"pipeline-{number}"))
    if parts.local:
        tiles = ((name, tiled_host(array)) for name, array in sorted(parts.local.items()))
        by_leaf.update({name: [w] for name, w in write_shards(folder / "process-local.bin", tiles).items()})
    for path, names in parts.names.items():
        whole = [leaf_of(path, by_leaf[n]) for n in names]
        yield whole[0] if len(whole) == 1 else leaf_of(path, [stacked(whole)])


def _read_remote(folder: Path, wanted: Mapping[str, tuple[Leaf, Any]]) -> dict[str, Any]:
    """Leaves that workers have, read by them; by path."""
    owners: list[tuple[ArrayOwner, dict[int, Leaf]]] = []
    for leaf, like in wanted.values():
        _check(folder, leaf, like)
        shards = like.shards if isinstance(like, RemoteStack) else [like]
        size = leaf.shape[0] // len(shards) if len(shards) > 1 else 0
        for k, piece in enumerate(shards):
            by_owner = next((by_owner for owner, by_owner in owners if owner is piece.owner), None)
            if by_owner is None:
                by_owner = {}
                owners.append((piece.owner, by_owner))
            by_owner[piece.id] = leaf.rows(k * size, size) if size else leaf
    arrays: dict[int, RemoteArray] = {}
    for owner, by_owner in owners:
        arrays.update(owner.read(folder, by_owner))
    read: dict[str, Any] = {}
    for path, (_, like) in wanted.items():
        some = like.shards if isinstance(like, RemoteStack) else None
        read[path] = arrays[like.id] if some is None else RemoteStack([arrays[p.id] for p in some])
    return read


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _host(leaf: Any) -> Any:
    if isinstance(leaf, RemoteArray):
        return leaf.host
    host = to_host(leaf)
    return host.copy() if isinstance(host, np.ndarray) else host


def _content(folder: Path) -> _Content:
    file = folder / _LIST
    try:
        with open_plain(file) as list_file:
            content = msgspec.json.decode(list_file.read(_MOST_LIST_BYTES), type=_Content)
        if content.format != _FORMAT:
            raise ValueError(f"its format is {content.format}, not {_FORMAT}")
        if _folder(content.step) != folder.name:
            raise ValueError(f"it is that of step {content.step}")
        check_leaves(folder, content.leaves)
    except DamageError as error:
        raise _damaged(folder / error.file, error) from error
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _damaged(file, error) from error
    return content


def _read(folder: Path, leaf: Leaf, like: Any) -> Any:
    data = read_whole(folder, leaf)
    array = from_host(HostKeys(leaf.key, data) if leaf.key else data)
    _check(folder, leaf, like)
    sharding = getattr(like, "sharding", None)
    return array if sharding is None or isinstance(like, RemoteArray) else jax.device_put(array, sharding)


def _check(folder: Path, leaf: Leaf, like: Any) -> None:
    """CheckpointError where a leaf is of another shape or type than it is wanted."""
    shape = leaf.shape[: len(like.shape)] if leaf.key else leaf.shape
    dtype = str(jax.random.key(0, impl=leaf.key).dtype) if leaf.key else leaf.dtype
    if tuple(shape) != tuple(like.shape) or dtype != str(like.dtype):
        raise CheckpointError(
            f"{leaf.path} is {dtype}{list(shape)} in {folder}, not {like.dtype}{list(like.shape)}",
            remedy="restore it with the state that it was made from",
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not what was written: {error}",
        cause="the file was changed, cut off, or the disk has errors",
        remedy="restore another step",
    )


def _unwritten(step: int, error: Exception) -> CheckpointError:
    fact = f"the checkpoint of step {step} cannot be written"
    if isinstance(error, WorkerLostError):
        return CheckpointError(
            f"{fact}: {error.fact}", cause="workers were lost", remedy="recover=True replaces lost workers"
        )
    return CheckpointError(
        f"{fact}: {error}",
        cause="the disk is full, or the folder may not be written to",
        remedy="make room; checkpoints that were written before are as they were",
    )


class Save:
    """A folder on its way; what is not finished is removed.

    Args:
        folder: where it is.
        name: that it gets.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._target = folder / name
        self.part = folder / f".{name}.{secrets.token_hex(8)}.part"
        self._lock = -1

    def __enter__(self) -> Save:
        self.part.mkdir(mode=0o700)
        # Others that find the folder see by the lock that its writer lives.
        self._lock = os.open(self.part, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def finish(self) -> None:
        """Gives the folder its name; at any moment there is the old one or the new one."""
        _sync(self.part)
        if self._target.exists():
            old = self.part.with_suffix(".old")
            if _exchange(self.part, self._target):
                os.rename(self.part, old)
            else:
                # Who looks when this is not finished gives the old one its name back.
                os.rename(self._target, old)
                os.rename(self.part, self._target)
            _sync(self._folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(self.part, self._target)
        _sync(self._folder)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.part, ignore_errors=True)
        os.close(self._lock)


def mend(folder: Path) -> None:
    """Gives folders their names back that a save had taken when it was killed."""
    for path, name, kind in _remains(folder):
        if kind == "old" and not (folder / name).exists() and not _is_alive(path):
            with contextlib.suppress(OSError):
                os.rename(path, folder / name)


def remove_remains(folder: Path) -> None:
    """Removes what killed saves left."""
    mend(folder)
    for path, _, _ in _remains(folder):
        if not _is_alive(path):
            shutil.rmtree(path, ignore_errors=True)


def discard(folder: Path, name: str) -> None:
    """Removes a folder that has its name, as a whole: a part of it never has the name."""
    left = folder / f".{name}.{secrets.token_hex(8)}.part"
    os.rename(folder / name, left)
    shutil.rmtree(left, ignore_errors=True)


def _remains(folder: Path) -> list[tuple[Path, str, str]]:
    remains = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _REMAINS.fullmatch(path.name)
            if match is not None and not path.is_symlink():
                remains.append((path, match["name"], match["kind"]))
    return remains


def _is_alive(path: Path) -> bool:
    """Whether somebody writes a folder."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    finally:
        os.close(handle)
    return False


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges the names of two folders at once; False where the system or the disk cannot."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0)
    return False


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
