"""Machine code of compiled loops on disk, so that only the first process compiles.

A file holds one function for one signature; its name is a hash of all that the code depends on: the text of all
modules of the solver that name them (a loop includes those that it calls), the signature, the processor, and the
versions of Python, numpy and numba. Files are written whole or not at all, and never change, so processes share them
without locks. Loading one runs what is in it: each time it is checked that no other user can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from autopar._compat.files import CACHE_VARIABLE, cache_root, private_folder, read_kept, write_whole

_SUFFIX = ".kernel"
_MARK = ".kept"  # an empty file for each processor and source of which code is kept
_UNUSED_S = 60 * 86400.0  # after which a file is removed
_MOST_BYTES = 2**26


def kernel_folder(environment: Mapping[str, str]) -> Path:
    """The folder of compiled loops, which need not exist.

    Where nothing of a user's programs is kept, machine code lies with the bytecode of the package: it depends on
    autopar's own source alone.
    """
    root = cache_root(environment)
    return package_folder() if root is None else root / "kernels"


def package_folder() -> Path:
    """The folder of loops compiled ahead of time (`autopar.solver.prepare`), with the bytecode of the package."""
    return Path(__file__).parent / "__pycache__" / "kernels"


@dataclass(frozen=True)
class KernelCache:
    """The cache interface of numba for compiled code of one function; no error of a file is raised.

    Args:
        function: its name with its module.
        folder: of the files.
        source: hash of the solver's modules with compiled loops, and of the versions that machine code depends on.
        prepared: a folder of code compiled ahead of time, which is read where ``folder`` lacks it, and never written.
    """

    function: str
    folder: Path
    source: str
    prepared: Path | None = None

    @property
    def cache_path(self) -> str:
        """Folder of the compiled functions, as text."""
        return str(self.folder)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled function for a signature; None where there is none, or what is there is damaged."""
        context.refresh()
        path = self._path(signature, context.codegen())
        try:
            compiled = _read(path, context)
        except PermissionError as error:
            _warn(error)
            compiled = None
        if compiled is None and self.prepared is not None:
            with contextlib.suppress(PermissionError):
                compiled = _read(self.prepared / path.name, context)
        return compiled

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keeps a compiled function."""
        if compiled.library.has_dynamic_globals or not all(part.can_cache for part in compiled.lifted):
            return
        path = self._path(signature, compiled.library.codegen)
        data = import_module("numba.core.serialize").dumps(compiled._reduce())
        try:
            private_folder(self.folder, tighten=True)
            write_whole(path, data, private=True)
            (self.folder / _mark()).touch(mode=0o600)
        except OSError as error:
            _warn(error)
            return
        self._drop_unused()

    def enable(self) -> None:
        """Part of numba's interface; a cache is always enabled."""

    def disable(self) -> None:
        """Part of numba's interface; changes nothing."""

    def flush(self) -> None:
        """Part of numba's interface; files are named by content, so none is out of date."""

    def _path(self, signature: Any, codegen: Any) -> Path:
        parts = (self.source, self.function, str(signature), repr(codegen.magic_tuple()))
        return self.folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:40]}{_SUFFIX}"

    def _drop_unused(self) -> None:
        """Removes code that was not loaded for long, and marks where no code is left: loads refresh the code alone."""
        code = list(self.folder.glob(f"*{_SUFFIX}*"))
        unused = [path for path in code if _is_unused(path)]
        for path in (*unused, *(self.folder.glob(f"*{_MARK}") if len(unused) == len(code) else ())):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_unused(path: Path) -> bool:
    try:
        return path.stat().st_mtime < time.time() - _UNUSED_S
    except OSError:  # another process removed it
        return True


def is_kept(environment: Mapping[str, str]) -> bool:
    """Whether loops of this source for this processor were kept on this machine, as far as names of files tell.

    It loads nothing. What it decides changes no result: compiled loops give the bits that numpy gives.
    """
    name = _mark()
    return any((folder / name).exists() for folder in (kernel_folder(environment), package_folder()))


def _mark() -> str:
    """Name of the file that stands for code of this source and processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        processor = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [platform.processor()]
    return hashlib.sha256(repr((source_hash(), processor)).encode()).hexdigest()[:40] + _MARK


def _read(path: Path, context: Any) -> Any:
    """The compiled function of a file; None where there is none, or what is there is damaged.

    Raises:
        PermissionError: another user may have written the file.
    """
    try:
        payload = pickle.loads(read_kept(path, _MOST_BYTES))
        compiled = import_module("numba.core.compiler").CompileResult._rebuild(context, *payload)
    except PermissionError:
        raise
    except Exception:  # there is no such file, or one that was cut short or damaged, which may raise anything
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return compiled


def _warn(error: OSError) -> None:
    """Says once that code is compiled again because of who may write to files; what the system refuses is silent."""
    if isinstance(error, PermissionError) and error.errno is None:
        warnings.warn(
            f"compiled loops of the solver are not kept, and each process compiles them for some 10 seconds: {error}; "
            f"{CACHE_VARIABLE} names another folder",
            RuntimeWarning,
            stacklevel=2,
        )


def source_hash() -> str:
    """A hash of the solver's modules with compiled loops, and of the versions that machine code depends on."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        if b"compiled" in text:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + text + b"\0")
    versions = (platform.python_implementation(), platform.python_version(), platform.machine(), np.__version__)
    digest.update(repr((versions, version("numba"))).encode())
    return digest.hexdigest()
