"""What other users of a machine can read, change or reach: nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from autopar._compat.files import file_hashes, private_folder, read_own, write_private
from autopar.runtime.ray.host import configure
from autopar.runtime.ray.messages import Handshake, encode
from autopar.runtime.ray.tls import credentials_of, new_identity
from autopar.runtime.transport.channels import Listener, dial

SECRET = b"0123456789abcdef"
_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


def test_folders_are_made_private_and_checked(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    made.chmod(0o755)
    with pytest.raises(PermissionError, match="others can enter it"):
        private_folder(made)
    assert private_folder(made, tighten=True).stat().st_mode & 0o077 == 0
    link = tmp_path / "link"
    link.symlink_to(made)
    with pytest.raises(PermissionError, match="is a link"):
        private_folder(link)
    made.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="replaced by others"):
        private_folder(made)


@_root
def test_what_belongs_to_others_is_not_used(tmp_path: Path) -> None:
    folder, file = private_folder(tmp_path / "theirs"), tmp_path / "file"
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="another user"):
        private_folder(folder)
    write_private(file, b"text")
    assert read_own(file, 10) == b"text"
    os.chown(file, 65534, 65534)
    with pytest.raises(PermissionError, match="this user"):
        read_own(file, 10)


def test_own_files_are_read_as_far_as_is_said(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    write_private(file, b"12345")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_private(file, b"")
    with pytest.raises(ValueError, match="the limit is 4"):
        read_own(file, 4)
    os.mkfifo(pipe, 0o600)
    with pytest.raises(PermissionError):
        read_own(pipe, 4)
    file.chmod(0o666)
    with pytest.raises(PermissionError):
        read_own(file, 10)


def test_programs_that_no_worker_wrote_are_removed(tmp_path: Path) -> None:
    """A worker that starts is told the hashes of what workers before it wrote."""
    folder = private_folder(tmp_path / "programs")
    for name in ("mine-cache", "changed-cache", "new-cache"):
        write_private(folder / name, name.encode())
    known = file_hashes(folder, "-cache")
    del known["new-cache"]
    (folder / "changed-cache").write_bytes(b"other")
    configure(encode(Handshake(0, SECRET, ("127.0.0.1", 1), "127.0.0.1", str(folder), known)))
    assert [p.name for p in folder.iterdir()] == ["mine-cache"]
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        configure(encode(Handshake(0, SECRET, ("127.0.0.1", 1), "127.0.0.1", str(folder), known)))


def test_links_between_machines_are_encrypted() -> None:
    """With the certificate of the cluster and its secret; neither alone lets anybody in."""
    heard: list[bytes] = []
    identity = new_identity()
    credentials = credentials_of(SECRET, identity)
    listener = Listener(credentials, lambda c: heard.append(c.recv(5)))
    passed: list[bytes] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as tap:
            thread = threading.Thread(target=_forward, args=(tap, listener.address, passed))
            thread.start()
            with dial(tap.getsockname()[:2], credentials) as connection:
                connection.sendall(b"hello")
                assert connection.recv(1) == b""
            thread.join()
        assert heard == [b"hello"]
        assert SECRET not in b"".join(passed)
        assert b"hello" not in b"".join(passed)
        for stranger in (credentials_of(SECRET, new_identity()), credentials_of(b"f" * 16, identity)):
            with pytest.raises((ssl.SSLError, OSError, AssertionError)), dial(listener.address, stranger) as connection:
                assert connection.recv(1) != b""
        assert heard == [b"hello"]
    finally:
        listener.close()


def _forward(tap: socket.socket, address: tuple[str, int], passed: list[bytes]) -> None:
    near, _ = tap.accept()
    with near, socket.create_connection(address) as far:

        def pump(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(4096):
                    passed.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        back = threading.Thread(target=pump, args=(far, near))
        back.start()
        pump(near, far)
        back.join()
