"""Memory-mapped files of `on_disk`: of each parameter two, for even and odd versions.

A file has its version (int64), the bytes of its layout's text (int64), that text, and arrays that begin at multiples of
64 bytes. A version is -1 while arrays are written: a file that was not written to its end is never read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar._compat.files import private_folder
from autopar.errors import AutoparError, CheckpointError

_ALIGNMENT = 64
_FILE = re.compile(r"\d{5,}\.[01]")


@dataclass(frozen=True)
class ArrayOffset:
    """Place of an array in a file: ``offset`` in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """Places of moments in the files of a parameter.

    Args:
        text: paths, dtypes and shapes of its arrays, as JSON.
        places: of the arrays.
    """

    text: str
    places: tuple[ArrayOffset, ...]

    @property
    def bytes(self) -> int:
        """Size of a file."""
        return max([16 + len(self.text), *(p.end for p in self.places)])


def file_layout(parameter: str, paths: Sequence[str], shapes: Sequence[Any]) -> FileLayout:
    """The layout of a parameter's state.

    Args:
        parameter: its path.
        paths: of the leaves of its state.
        shapes: of the leaves, with dtypes.
    """
    listed = [[path, np.dtype(s.dtype).name, list(s.shape)] for path, s in zip(paths, shapes, strict=True)]
    text = json.dumps([parameter, listed])
    places: list[ArrayOffset] = []
    end = 16 + len(text)
    for s in shapes:
        places.append(ArrayOffset(tuple(s.shape), np.dtype(s.dtype), -(-end // _ALIGNMENT) * _ALIGNMENT))
        end = places[-1].end
    return FileLayout(text, tuple(places))


def checked_folder(path: str | os.PathLike[str]) -> Path:
    """A folder that only this user can enter; made with mode 0700 if it is not there.

    Raises:
        AutoparError: it is a link or a file, another user owns it, can enter or replace it, or it cannot be made.
    """
    try:
        return private_folder(path)
    except OSError as e:
        raise AutoparError(
            f"moments cannot lie in {os.fspath(path)}: {e}",
            cause="moments are read and written by their owner alone, in a folder of mode 0700 that is no link",
            remedy="name a folder of yours, or one that is not there yet",
        ) from e


def begin(folder: Path, number: int, layout: FileLayout, arrays: Sequence[Any]) -> None:
    """Makes the files of a parameter, with ``arrays`` as version 0.

    Raises:
        CheckpointError: files of a run that made steps are there; they cannot be made.
    """
    paths = [_path(folder, number, version) for version in (0, 1)]
    for path in paths:
        held = version_of(path)
        if held is not None and held > 0:
            raise CheckpointError(
                f"{path} has moments of step {held}, and init would begin with those of step 0",
                cause="an earlier run had its moments there",
                remedy="go on from its checkpoint, with jax.eval_shape(optimizer.init, params) for the state's "
                "structure; or remove the folder, or name another one",
            )
    try:
        for path in paths:
            path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(path, flags, 0o600)
            with os.fdopen(handle, "r+b") as file:
                file.truncate(layout.bytes)
                _reserve(file, layout)
                file.write(np.array([-1, len(layout.text)], "<i8").tobytes() + layout.text.encode())
    except OSError as e:
        raise _unwritten(path, layout, e) from e
    write(folder, number, layout, 0, arrays)


def read(folder: Path, number: int, layout: FileLayout, version: int) -> tuple[NDArray[Any], ...]:
    """Arrays of a version, mapped into memory, read-only.

    Raises:
        CheckpointError: there is no file, it has another layout, or another version.
    """
    path = _path(folder, number, version)
    mapped = _mapped(path, layout, "r")
    held = int(mapped[:8].view("<i8")[0])
    if held != version:
        raise CheckpointError(
            f"the state is of step {version}, {path} has moments of step {held if held >= 0 else 'none'}",
            cause="the state is of another checkpoint than the files, or older than the last two steps",
            remedy="copy the folder with each checkpoint, and copy it back with that",
        )
    return _arrays(mapped, layout)


def write(folder: Path, number: int, layout: FileLayout, version: int, arrays: Sequence[Any]) -> None:
    """Makes ``arrays`` the ones of ``version``, in place of those of two versions before.

    Raises:
        CheckpointError: there is no file, it has another layout, the disk is full, or arrays have other dtypes.
    """
    path = _path(folder, number, version)
    mapped = _mapped(path, layout, "r+")
    try:
        with _opened(path, os.O_RDWR) as file:
            _reserve(file, layout)
    except OSError as e:
        raise _unwritten(path, layout, e) from e
    mapped[:8].view("<i8")[0] = -1
    for place, array in zip(_arrays(mapped, layout), arrays, strict=True):
        if (given := np.asarray(array).dtype) != place.dtype:
            raise CheckpointError(
                f"moments of {place.dtype} come as {given}",
                cause="jax.enable_x64 as a context holds in one thread, and callbacks run in others",
                remedy='turn it on for all of them: jax.config.update("jax_enable_x64", True)',
            )
        place[...] = np.asarray(array)
    mapped[:8].view("<i8")[0] = version


def version_of(path: Path) -> int | None:
    """The version of a file; -1 where it was not written to its end, None where there is no file."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            begun = file.read(8)
    except FileNotFoundError:
        return None
    return int(np.frombuffer(begun, "<i8")[0]) if len(begun) == 8 else -1


def versions(folder: Path) -> dict[str, list[int]]:
    """Versions that are held of each parameter, by its number."""
    held: dict[str, list[int]] = {}
    for path in sorted(folder.iterdir()):
        version = version_of(path) if _FILE.fullmatch(path.name) else None
        if version is not None:
            held.setdefault(path.stem, []).append(version)
    return held


def check_layout(folder: Path, number: int, layout: FileLayout) -> None:
    """Raises CheckpointError where files of a parameter are there and have another layout."""
    for version in (0, 1):
        path = _path(folder, number, version)
        if os.path.lexists(path):
            _mapped(path, layout, "r")


def _reserve(file: Any, layout: FileLayout) -> None:
    """Room on the disk for all of a file: a full disk is an OSError here, and would be a signal while it is mapped.

    A file has it from the beginning, one that was copied with holes has not.
    """
    if hasattr(os, "posix_fallocate") and os.fstat(file.fileno()).st_blocks * 512 < layout.bytes:
        os.posix_fallocate(file.fileno(), 0, layout.bytes)


def _unwritten(path: Path, layout: FileLayout, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{layout.bytes} bytes of moments cannot be written to {path}: {error}",
        cause="a full disk; each parameter has its moments twice there",
        remedy="make room, or name a folder on a larger disk; the moments of the step before are as they were",
    )


def _path(folder: Path, number: int, version: int) -> Path:
    return folder / f"{number:05d}.{version % 2}"


def _opened(path: Path, flags: int) -> Any:
    """An open file of this user; see `os.open` for ``flags``."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    file = os.fdopen(handle, "rb" if flags == os.O_RDONLY else "r+b")
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
        return file
    file.close()
    raise PermissionError(f"{path} is not a file of this user alone")


def _mapped(path: Path, layout: FileLayout, mode: Literal["r", "r+"]) -> NDArray[Any]:
    """The bytes of a file that has the layout."""
    try:
        with _opened(path, os.O_RDONLY if mode == "r" else os.O_RDWR) as file:
            count = int(np.frombuffer(file.read(16)[8:].ljust(8, b"\0"), "<i8")[0])
            text = file.read(min(max(count, 0), 1 << 24)).decode(errors="replace")
            size = os.fstat(file.fileno()).st_size
            if text == layout.text and size >= layout.bytes:
                return np.memmap(file, np.uint8, mode, shape=(layout.bytes,))
    except OSError as e:
        raise CheckpointError(
            f"moments are not in {path}: {e}",
            cause="init was never called with the parameters, or the folder was removed or is that of another machine",
            remedy="call init, or copy back the folder that was copied with the checkpoint",
        ) from e
    raise CheckpointError(
        f"{path} has {text or 'nothing'} in {size} bytes, the state has {layout.text} in {layout.bytes}",
        cause="the folder is of a run with another model or optimizer",
        remedy="name another folder",
    )


def _arrays(mapped: NDArray[Any], layout: FileLayout) -> tuple[NDArray[Any], ...]:
    return tuple(mapped[p.offset : p.end].view(p.dtype).reshape(p.shape) for p in layout.places)
