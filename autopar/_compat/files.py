"""Files of autopar: the folder kept between processes, files written whole, files that only their owner changes.

`cache_root` is the folder of plans, compiled loops and calibrations. `private_folder`, `read_own` and `read_kept`
check who may write whenever they are called. `write_whole` writes. No format of a file is known here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

#: Environment variable that names the folder of what autopar keeps, or turns that off.
CACHE_VARIABLE = "AUTOPAR_CACHE_DIR"

_OFF = ("", "0", "none", "off")
#: Links that a path may lead over; Linux follows no more.
_MOST_LINKS = 40


def cache_root(environment: Mapping[str, str]) -> Path | None:
    """The folder of what autopar keeps of a user's programs; None where the environment turns that off.

    Args:
        environment: variables. `CACHE_VARIABLE` is a folder, or one of "", "0", "none" and "off" for none. Without it
            the folder is ``autopar`` in ``XDG_CACHE_HOME``, or in ``~/.cache`` where that is no absolute path; None
            where ``HOME`` is none either.
    """
    asked = environment.get(CACHE_VARIABLE)
    if asked is not None and asked.strip().lower() in _OFF:
        return None
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    folder = Path(asked) if asked is not None else (shared if shared.is_absolute() else Path("~/.cache")) / "autopar"
    try:
        folder = folder.expanduser()
    except RuntimeError:  # the user has no home directory
        return None
    # An empty HOME makes the root of the file system the home, and a relative one the working directory.
    is_absolute = asked is not None or shared.is_absolute() or Path(environment.get("HOME", "/home")).is_absolute()
    return folder if is_absolute else None


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
    _check_route(folder)
    return folder


def _check_route(folder: Path) -> None:
    """Raises PermissionError where another user can put something else in the place of a folder.

    Folders above it, those that links on the route lead to, and the links themselves belong to this user or to root.
    Others write to such a folder only where they cannot rename what is in it (the sticky bit).
    """
    routes, checked, links = [folder], set[str](), 0
    while routes:
        for part in routes.pop().parents:
            if str(part) in checked:
                continue
            checked.add(str(part))
            about = part.lstat()
            is_link = stat.S_ISLNK(about.st_mode)
            if is_link:
                links += 1
                if links > _MOST_LINKS:
                    raise PermissionError(f"{folder} is reached by more than {_MOST_LINKS} links")
                routes.append(part.parent / os.readlink(part) / "target")
            replaces = not is_link and not about.st_mode & stat.S_ISVTX and _others_write(about)
            if about.st_uid not in (0, os.geteuid()) or replaces:
                raise PermissionError(f"{folder} can be replaced by others, who may write to {part} or own it")


def _others_write(about: os.stat_result) -> bool:
    """Whether users but the owner and root may write. Root's group and a user's own group, of one number with the user
    by convention, have no other members."""
    own_group = about.st_gid == 0 or about.st_gid == os.geteuid() == os.getegid()
    return bool(about.st_mode & 0o002) or (bool(about.st_mode & 0o020) and not own_group)


def read_kept(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a file in a private folder; the folders above it are checked, too.

    Args:
        path: of the file.
        most_bytes: that it may have.

    Raises:
        PermissionError: another user can change the file, or could have put it there.
        ValueError: it is too large.
        OSError: it cannot be read.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(os.fspath(path))
    private_folder(os.path.dirname(os.path.abspath(path)), tighten=True)
    return read_own(path, most_bytes)


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, private: bool = False) -> None:
    """Writes ``content`` (text as UTF-8) to ``path`` so that the file is the old one or the new one, never a part.

    Args:
        path: of the file.
        content: all of it.
        private: whether only its owner can read it. Else it has the mode of the file that it replaces, or of a new
            file under the umask.

    Raises:
        OSError: it cannot be written; a path of a folder among them.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    mode = 0o600 if private else 0o666
    try:
        _write_new(part, content.encode() if isinstance(content, str) else content, mode, sync=True)
        if not private:
            with contextlib.suppress(OSError):
                part.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_private(path: str | os.PathLike[str], data: bytes, *, sync: bool = False) -> None:
    """Writes a new file that only this user can read. FileExistsError where there is one.

    Args:
        path: of the file.
        data: its content.
        sync: whether to return when it is on disk.
    """
    _write_new(path, data, 0o600, sync=sync)


def _write_new(path: str | os.PathLike[str], data: bytes, mode: int, *, sync: bool) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
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
