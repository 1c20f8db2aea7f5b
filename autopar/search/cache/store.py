"""`PlanCache`: files of plans in a folder, each under its key."""

from __future__ import annotations

import contextlib
import gzip
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from autopar._compat.files import CACHE_VARIABLE, cache_root, private_folder, read_kept, write_whole
from autopar.errors import PlanMismatchError
from autopar.plan import Plan, PlanContent
from autopar.plan.codec import encode
from autopar.plan.details import NO_DETAILS, Details
from autopar.plan.trail import TrailRow
from autopar.search.plain_data import environment_hash
from autopar.solver.meter import Meter, Work

_SUFFIX = ".plan.gz"
#: Of what `write_whole` has not finished.
_PART = ".part"
#: Between size and speed: plans are repetitive text, so that more effort wins little.
_EFFORT = 6
#: Bytes of a plan's text at most: a small file may unpack to any size.
_MOST_UNPACKED_BYTES = 2**28
#: zlib's name of the format.
_GZIP = 16 + zlib.MAX_WBITS
#: Seconds after which what a writer left that was ended is removed.
_LEFT_S = 3600.0
#: Environment variable that names the folder of what autopar keeps, or turns that off.
VARIABLE = CACHE_VARIABLE


@dataclass(frozen=True)
class PlanCache:
    """Plans as files that several processes may read and write at the same time.

    A file has the key and the plan's JSON, compressed. It is there whole or not at all. What cannot be read or written
    is as if it were not there: nothing here raises for the sake of a file.

    Args:
        folder: where the files are; made when the first is written.
        most_bytes: bytes that they may take together; those that were not used for longest are dropped.
        least_s: seconds that planning must have taken for the plan to be kept.
    """

    folder: Path
    most_bytes: int = 2**28
    least_s: float = 1.0

    @cached_property
    def environment_hash(self) -> str | None:
        """See `autopar.search.plain_data.environment_hash`; read once."""
        return environment_hash()

    def get(self, key: str) -> PlanContent | None:
        """The plan of `get_plan`."""
        plan = self.get_plan(key)
        return None if plan is None else plan.content

    def get_plan(self, key: str) -> Plan | None:
        """The plan of `get_metered`."""
        kept = self.get_metered(key)
        return None if kept is None else kept[0]

    def get_metered(self, key: str) -> tuple[Plan, Meter, Sequence[TrailRow]] | None:
        """The plan kept under a key, which counts as used, with what it took and its trail; None where there is none.

        A file that is cut short, damaged or something else is removed.
        """
        path = self._path(key)
        try:
            raw = read_kept(path, self.most_bytes)
        except (OSError, ValueError):
            return None
        try:
            kept = _unpacked(key, raw)
        except (OSError, EOFError, ValueError, zlib.error, PlanMismatchError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return kept

    def put(
        self,
        key: str,
        content: PlanContent,
        details: Details = NO_DETAILS,
        meter: Meter | None = None,
        rows: Sequence[TrailRow] = (),
    ) -> None:
        """Keeps a plan under a key, unless it is too large, its text does not give it back, or the disk is full."""
        with contextlib.suppress(OSError, ValueError, PlanMismatchError):
            raw = _packed(key, encode(content, details), meter or Meter(), rows)
            if len(raw) <= self.most_bytes and _unpacked(key, raw)[0].content == content:
                private_folder(self.folder, tighten=True)
                write_whole(self._path(key), raw, private=True)
                self._drop_oldest()

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each plan's file."""
        return tuple(size for _, size, path in self._files() if path.suffix != _PART)

    def clear(self) -> int:
        """Removes all files, and says how many were removed."""
        return sum(_removed(path) for _, _, path in self._files())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of all files, the oldest first."""
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"*{_SUFFIX}*"):
                with contextlib.suppress(OSError):  # another process removed it
                    stat = path.stat()
                    files.append((stat.st_mtime, stat.st_size, path))
        return sorted(files)

    def _drop_oldest(self) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for used, size, path in files:
            left_over = path.suffix == _PART and used < time.time() - _LEFT_S
            if left_over or (total > self.most_bytes and path.suffix != _PART):
                _removed(path)
                total -= size


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


class _Searched(msgspec.Struct):
    """Work of planning by kind and by key of a store, and its trail."""

    counts: dict[Work, int]
    kept: dict[str, dict[Work, int]]
    rows: tuple[TrailRow, ...]


def _packed(key: str, plan: str, meter: Meter, rows: Sequence[TrailRow]) -> bytes:
    searched = msgspec.json.encode(_Searched(meter.counts, meter.kept, tuple(rows))).decode()
    return gzip.compress(f"{key}\n{searched}\n{plan}".encode(), _EFFORT, mtime=0)


def _unpacked(key: str, raw: bytes) -> tuple[Plan, Meter, Sequence[TrailRow]]:
    """The plan in a file, and what it took. ValueError and others where it holds none, or that of another key."""
    unpacker = zlib.decompressobj(_GZIP)
    data = unpacker.decompress(raw, _MOST_UNPACKED_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"the file holds more than {_MOST_UNPACKED_BYTES} bytes, or is cut short")
    head, _, text = data.partition(b"\n")
    if head != key.encode():
        raise ValueError(f"the file holds {head[:64]!r}")
    searched, _, text = text.partition(b"\n")
    known = msgspec.json.decode(searched, type=_Searched)
    return Plan.from_json(text), Meter(known.counts, known.kept), known.rows


def plan_cache(environment: Mapping[str, str]) -> PlanCache | None:
    """The cache that an environment asks for, in a folder ``plans``; None where it is turned off.

    Args:
        environment: variables; see `cache_root`.
    """
    root = cache_root(environment)
    return None if root is None else PlanCache(root / "plans")
