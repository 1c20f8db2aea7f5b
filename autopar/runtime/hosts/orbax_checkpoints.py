"""Checkpoints in Orbax's format: asynchronous, whole or not at all, every process writes its own shards.

Orbax calls an array that lies on one process's devices that process's own, and refuses to write it next to those of
others. A stage of a pipeline that lies inside one process has such arrays: they are written from devices of all.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import CheckpointError
from autopar.runtime.hosts.arrays import spread, whole

#: Names of the arrays of a manager's step, and of what a checkpointer writes without a manager.
_ITEM = "default"
_MARKS = ("_METADATA", "manifest.ocdbt", "checkpoint")


class Saver:
    """Checkpoints in one folder, one in a folder for each step.

    Args:
        path: of the folder; on many hosts it is one that all of them share.
        keep: how many are kept, the latest; None keeps all.
    """

    def __init__(self, path: str, keep: int | None) -> None:
        self.path = path
        self.keep = keep
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(Path(path).resolve(), options=options)
        atexit.register(self.close)

    def save(self, state: Any, at: int | None) -> int:
        """Begins to write ``state``; returns its number when the arrays may be used again.

        Args:
            state: pytree of arrays and numbers.
            at: its number; None takes the one after the latest.

        Raises:
            CheckpointError: it cannot be written, or there is one with that number.
        """
        latest = self._manager.latest_step()
        number = at if at is not None else 0 if latest is None else latest + 1
        if number in self._manager.all_steps():
            raise CheckpointError(f"{self.path} has a checkpoint {number} already", remedy="give another number as at=")
        try:
            self._manager.save(number, args=ocp.args.StandardSave(jax.tree.map(spanning, state)), force=True)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {number} cannot be written to {self.path}: {error}",
                cause="the disk is full, the folder is not every process's, or leaves of the state are not arrays",
                remedy="earlier checkpoints are as they were",
            ) from error
        return number

    def wait(self) -> None:
        """Returns when all that was saved is on disk. CheckpointError where it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(
                f"a checkpoint in {self.path} could not be written: {error}", remedy="restore an earlier one"
            ) from error

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        atexit.unregister(self.close)
        self.wait()
        self._manager.close()


def steps(path: str) -> tuple[int, ...]:
    """Numbers of the checkpoints in a folder, rising. Those that were not written to the end do not count."""
    folder = Path(path)
    if not folder.is_dir():
        return ()
    whole = [p for p in folder.iterdir() if p.name.isdigit() and (p / _ITEM).is_dir()]
    return tuple(sorted(int(p.name) for p in whole))


def folder_of(path: str, at: int | None) -> Path:
    """The folder of the arrays of a checkpoint.

    Args:
        path: what a `Saver` wrote to, or one checkpoint of Orbax or Flax.
        at: number of the one; None takes the latest.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path).resolve()
    if at is None and any((folder / m).exists() for m in _MARKS):
        return folder
    if at is None and (folder / _ITEM).is_dir():
        return folder / _ITEM
    known = steps(path)
    number = at if at is not None else known[-1] if known else None
    if number is None or number not in known:
        which = "checkpoint" if number is None else f"checkpoint {number}"
        raise CheckpointError(
            f"{path} has no {which}; it has {', '.join(map(str, known)) or 'none'}",
            cause="the path is another, or no checkpoint was written to the end",
            remedy="give the folder that save wrote to, or a checkpoint of Orbax itself",
        )
    return folder / str(number) / _ITEM


def shapes_of(folder: Path) -> Any:
    """Contents of a checkpoint, as nested dicts and lists of `jax.ShapeDtypeStruct`. CheckpointError where damaged."""
    try:
        with ocp.StandardCheckpointer() as reader:
            tree = reader.metadata(folder)
        tree = getattr(tree, "item_metadata", tree)
        tree = getattr(tree, "tree", tree)
        if tree is None:
            raise ValueError("its list of arrays is gone")
        return jax.tree.map(lambda m: jax.ShapeDtypeStruct(tuple(m.shape), m.dtype), tree)
    except Exception as error:
        raise _unreadable(folder, error) from error


def restored(folder: Path, like: Any) -> Any:
    """The arrays of a checkpoint.

    Args:
        folder: as `folder_of` names it.
        like: pytree of `jax.ShapeDtypeStruct` with shardings, of the structure of the result.

    Raises:
        CheckpointError: it has other arrays, or is damaged.
    """
    try:
        with ocp.StandardCheckpointer() as reader:
            read = reader.restore(folder, jax.tree.map(_read_as, like))
        return jax.tree.map(lambda x, s: x if spans(s.sharding) else onto(x, s.sharding), read, like)
    except Exception as error:
        raise _unreadable(folder, error) from error


def _read_as(like: Any) -> Any:
    """Restore arguments of an array that is wanted as ``like``."""
    if spans(like.sharding):
        return like
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=everywhere(like.shape))


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"the checkpoint in {folder} cannot be read: {first}",
        cause="it is of a state of another structure, or its files are not what was written",
        remedy="restore another step, or give a state of its structure",
    )


def spans(sharding: Any) -> bool:
    """Whether a sharding has devices of all processes, or is none on a mesh."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return True
    devices: Any = sharding.device_set
    return len({int(d.process_index) for d in devices}) == int(jax.process_count())


def everywhere(shape: tuple[int, ...]) -> NamedSharding:
    """A sharding over all devices: of the first dim where they divide it, else of nothing."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    split = bool(shape) and shape[0] > 0 and shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec("devices") if split else PartitionSpec())


def spanning(leaf: Any) -> Any:
    """``leaf`` on devices of all processes, which call this together; what lies so already as it is."""
    if not isinstance(leaf, jax.Array) or spans(leaf.sharding):
        return leaf
    return spread(whole(leaf), leaf.dtype, everywhere(leaf.shape), copy=False)


def onto(array: Any, wanted: NamedSharding) -> Any:
    """An array on devices of all processes where it is wanted, on devices of some."""
    return spread(whole(array), array.dtype, wanted, copy=True) if array.sharding != wanted else array
