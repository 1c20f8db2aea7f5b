"""Inputs of a plan as plain data for JSON: equal inputs give equal data, in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

#: Packages whose version may change a plan; one that is not installed counts as that.
PACKAGES = ("highspy", "jax", "jaxlib", "msgspec", "networkx", "numba", "numpy", "pulp", "scipy")


class NotPlainError(ValueError):
    """The value cannot be plain data, as a user's function."""


def plain_data(value: Any) -> Any:
    """A value as data for JSON.

    Args:
        value: None, a truth value, a number, text, a tuple or a frozenset of such; a function or an object of autopar
            that holds nothing else. What autopar's own things do is in `environment_hash`.

    Raises:
        NotPlainError: it is something else: a function or an object of a user, or one that collects.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, tuple):
        return [plain_data(v) for v in value]
    if isinstance(value, frozenset):
        return {"set": sorted(json.dumps(plain_data(v)) for v in value)}
    if isinstance(value, FunctionType):
        return {"function": _qualified_name(value)}
    return {"object": _qualified_name(type(value)), "of": {name: plain_data(v) for name, v in _parts(value)}}


def is_own(kind: type | FunctionType) -> bool:
    """Whether a class or function is autopar's own, so that its module has it under its name."""
    placement, *names = kind.__module__, *kind.__qualname__.split(".")
    module: Any = sys.modules.get(placement)
    for name in names:
        module = getattr(module, name, None)
    return placement.startswith(f"{_package()}.") and module is kind


def is_importable(value: Any) -> bool:
    """Whether a function or an object is autopar's own, with all that it holds: another process can have it as well."""
    if isinstance(value, FunctionType):
        return is_own(value)
    if value is None or isinstance(value, str | Integral | float | Path):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(is_importable, value))
    parts = [v for _, v in _parts(value)] if dataclasses.is_dataclass(value) else None
    return parts is not None and is_own(type(value)) and all(map(is_importable, parts))


def _qualified_name(kind: type | FunctionType) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not is_own(kind):
        raise NotPlainError(f"{name} is not autopar's own")
    return name


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Names and values of what an object holds, sorted."""
    if dataclasses.is_dataclass(value):
        return sorted((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, msgspec.Struct):
        return sorted((name, getattr(value, name)) for name in value.__struct_fields__)
    try:
        return sorted(vars(value).items())
    except TypeError as error:
        raise NotPlainError(f"{type(value).__qualname__} does not say what it holds") from error


def _package() -> str:
    return __name__.partition(".")[0]


def environment_hash() -> str | None:
    """SHA-256 of what every plan depends on: autopar's own code, Python, versions of packages, the kind of machine.

    64 hexadecimal digits; None where the code is not in files, so that a change of it would not be seen.
    """
    root = Path(__file__).resolve().parents[1]
    paths = sorted(root.rglob("*.py")) if Path(__file__).is_file() else []
    if not paths:
        return None
    files = tuple((p.relative_to(root).as_posix(), s.st_mtime_ns, s.st_size) for p in paths for s in (p.stat(),))
    return _hash_of_files(root, files)


@lru_cache(maxsize=1)
def _hash_of_files(root: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """The environment's hash with the code of a folder, which is read once a process unless a file changes.

    Args:
        root: the folder.
        files: path in it, time of the last change in ns, and bytes of each file.
    """
    digest = hashlib.sha256()
    for path, _, _ in files:
        text = (root / path).read_bytes()
        digest.update(f"{path} {len(text)}\n".encode() + text)
    versions = [(name, _version(name)) for name in PACKAGES]
    digest.update(json.dumps([versions, list(sys.version_info[:3]), platform.machine()]).encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
