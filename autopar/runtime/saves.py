"""`Save`: a folder that gets its name when all of it is on disk, in place of the one that has the name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from types import TracebackType

#: What is written, and what was replaced but is not removed yet: .NAME.RANDOM.part, .NAME.RANDOM.old
_REMAINS = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>part|old)")
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


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
