"""`Checkpoints`: states of a training on disk, whole or not at all, for any plan and number of stages.

A checkpoint is a folder with one file of raw numbers for each leaf and a ``checkpoint.json`` that says what they are,
with their checksums. It is written under another name and renamed when all of it is on disk. Leaves are stored whole,
so that they can be placed as any plan wants. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.errors import CheckpointError
from autopar.runtime.ray.driver import to_host
from autopar.runtime.ray.values import RemoteArray
from autopar.runtime.transport.tiles import HostKeys, from_host

_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_LIST = "checkpoint.json"


class _Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A leaf: its path in the tree, its file, and what the file holds."""

    path: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int
    key: str = ""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    step: int
    leaves: tuple[_Leaf, ...]


class Checkpoints:
    """The checkpoints of one training.

    Args:
        folder: where they are; made if it is not there.
        keep: how many are kept; older ones are removed after one was written. None keeps all.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[None] | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with a checkpoint, ascending; those that were not finished do not count."""
        names = [_NAME.fullmatch(p.name) for p in self.folder.glob("step-*")]
        return tuple(sorted(int(m[1]) for m in names if m is not None))

    def save(self, step: int, state: Any, *, wait: bool = True) -> None:
        """Writes a checkpoint.

        Args:
            step: its number; one that is there already is replaced.
            state: a pytree of arrays, on this process's devices or on workers.
            wait: whether to return when it is on disk; else its leaves are copied now and written meanwhile, and what
                goes wrong is raised by the next call of `save` or `wait`.

        Raises:
            CheckpointError: it cannot be written, as on a full disk; older ones are as they were.
        """
        self.wait()
        leaves = [(jax.tree_util.keystr(p), _host(x)) for p, x in jax.tree_util.tree_flatten_with_path(state)[0]]
        self._writing = self._thread.submit(self._write, step, leaves)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved is on disk. Raises CheckpointError where it is not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore(self, like: Any, step: int | None = None) -> Any:
        """The state of a checkpoint.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of its structure; where a leaf has a sharding of this
                process's devices the array lies so, else it is a numpy array for `ParallelFunction.shard`.
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
        found = {leaf.path: leaf for leaf in content.leaves}
        if wanted.keys() != found.keys():
            apart = min(wanted.keys() ^ found.keys())
            raise CheckpointError(
                f"{folder} is of another structure: {apart} is {'not there' if apart in wanted else 'only there'}",
                remedy="restore it with the state that it was made from",
            )
        return jax.tree.unflatten(treedef, [_read(folder, found[p], x) for p, x in wanted.items()])

    def _write(self, step: int, leaves: list[tuple[str, Any]]) -> None:
        part = self.folder / f".{_folder(step)}.{secrets.token_hex(8)}.part"
        target = self.folder / _folder(step)
        try:
            part.mkdir(parents=True)
            records = tuple(_write_leaf(part, number, path, array) for number, (path, array) in enumerate(leaves))
            content = msgspec.json.format(msgspec.json.encode(_Content(_FORMAT, step, records)), indent=1)
            _write_file(part / _LIST, content)
            _sync(part)
            if target.exists():
                old = part.with_suffix(".old")
                os.rename(target, old)
                os.rename(part, target)
                shutil.rmtree(old)
            else:
                os.rename(part, target)
            _sync(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {error}",
                cause="the disk is full, or the folder may not be written to",
                remedy="make room; checkpoints that were written before are as they were",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old_step in self.steps[: -self.keep] if self.keep else ():
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder / _folder(old_step))


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _host(leaf: Any) -> Any:
    if isinstance(leaf, RemoteArray):
        return leaf.host
    host = to_host(leaf)
    return host.copy() if isinstance(host, np.ndarray) else host


def _write_leaf(folder: Path, number: int, path: str, array: Any) -> _Leaf:
    key, data = (array.generator, array.data) if isinstance(array, HostKeys) else ("", array)
    numbers = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    name = f"{number:05d}.bin"
    _write_file(folder / name, numbers)
    return _Leaf(path, name, tuple(data.shape), data.dtype.name, zlib.crc32(numbers), key)


def _write_file(path: Path, data: bytes | memoryview) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _content(folder: Path) -> _Content:
    file = folder / _LIST
    content: _Content = _checked(file, lambda: msgspec.json.decode(file.read_bytes(), type=_Content))
    return content


def _read(folder: Path, leaf: _Leaf, like: Any) -> Any:
    def load() -> np.ndarray[Any, Any]:
        if Path(leaf.file).name != leaf.file:
            raise ValueError(f"{leaf.file!r} is outside of it")
        data = (folder / leaf.file).read_bytes()
        if zlib.crc32(data) != leaf.checksum:
            raise ValueError("the checksum is another")
        return np.frombuffer(data, jnp.dtype(leaf.dtype)).reshape(leaf.shape).copy()

    data = _checked(folder / leaf.file, load)
    array = from_host(HostKeys(leaf.key, data) if leaf.key else data)
    if tuple(array.shape) != tuple(like.shape) or array.dtype != like.dtype:
        raise CheckpointError(
            f"{leaf.path} is {array.dtype}{list(array.shape)} in {folder}, not {like.dtype}{list(like.shape)}",
            remedy="restore it with the state that it was made from",
        )
    sharding = getattr(like, "sharding", None)
    return array if sharding is None or isinstance(like, RemoteArray) else jax.device_put(array, sharding)


def _checked(path: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{path} is not what was written: {error}",
            cause="the file was changed, cut off, or the disk has errors",
            remedy="restore another step",
        ) from error
