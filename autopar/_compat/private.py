"""Files and folders that only their owner can read or change, checked when they are used."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path


def private_folder(path: str | os.PathLike[str], *, tighten: bool = False) -> Path:
    """A folder that only this user can enter; made if it is not there.

    Args:
        path: of the folder; folders above it are made, too, and must be such that others cannot replace it.
        tighten: whether a folder of this user that others can enter is made private, instead of refused.

    Raises:
        PermissionError: another user owns it, can enter it, or can put another one in its place.
        OSError: it cannot be made.
    """
    folder = Path(os.path.abspath(path))
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            with contextlib.suppress(FileExistsError):  # another process of the same cluster was faster
                part.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise PermissionError(f"{folder} is not a folder, or is a link to one")
    if tighten and about.st_uid == os.geteuid() and about.st_mode & 0o077:
        folder.chmod(0o700)
        about = folder.lstat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user, or others can enter it; chmod 700 makes it private")
    for part in folder.parents:
        above = part.stat()
        others_write = above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX
        if above.st_uid not in (0, os.geteuid()) or others_write:
            raise PermissionError(f"{folder} can be replaced by others, who may write to {part}")
    return folder


def write_private(path: str | os.PathLike[str], data: bytes, *, sync: bool = False) -> None:
    """Writes a new file that only this user can read. FileExistsError where there is one.

    Args:
        path: of the file.
        data: its content.
        sync: whether to return when it is on disk.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def read_own(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a file of this user that no other can change.

    Args:
        path: of the file.
        most_bytes: that it may have.

    Raises:
        PermissionError: it is of another user, or others may write to it, or it is no plain file.
        ValueError: it is too large.
        OSError: it cannot be read.
    """
    # Not waiting: a pipe in its place would.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(f"{path} is not a file of this user alone")
        if about.st_size > most_bytes:
            raise ValueError(f"{path} has {about.st_size} bytes; the limit is {most_bytes}")
        return file.read(most_bytes + 1)


def file_hashes(folder: Path, suffix: str) -> dict[str, str]:
    """SHA-256 of the files of a folder with a suffix, by name; files that go meanwhile are left out."""
    hashes: dict[str, str] = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        try:
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return hashes
