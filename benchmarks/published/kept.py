"""Bills of published runs on disk, by what they are bills of, so that a second command prices them at once.

A file's name is a hash of autopar's code, the examples, the versions of packages, the shape, the cluster and the
constants that the bill is planned with (`benchmarks.published.free.at_priors`): a fit changes none of them. Missing
bills are made by as many processes as there are processors.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autopar.cluster import Cluster, Span
from autopar.cost import Matrices
from autopar.cost.constants import load_constants
from autopar.errors import AutoparError
from autopar.search.problem_data import environment_hash
from autopar.solver.kernel_cache import cache_root
from benchmarks.published.bill import Bill, BilledMessage, Kernel
from benchmarks.published.free import at_priors
from benchmarks.published.plans import LAYERS, MICROBATCHES, RunBill, Shape, make_bill

#: What a bill is of: its shape, and the devices of a stage.
Asked: TypeAlias = tuple[Shape, Cluster]

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def bill(shape: Shape, cluster: Cluster) -> RunBill:
    """The bill of one step, from disk or made; see `benchmarks.published.plans.make_bill`."""
    path = _path(shape, cluster)
    if path is not None and path.exists():
        return _decoded(path.read_bytes())
    whole = make_bill(shape, cluster, at_priors(load_constants()))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(_encoded(whole))
        partial.replace(path)
    return whole


def make_missing(asked: Iterable[Asked]) -> int:
    """Makes the bills that are not on disk, on all processors; returns how many; 0 where nothing is kept."""
    missing = [a for a in dict.fromkeys(asked) if (path := _path(*a)) is not None and not path.exists()]
    if len(missing) > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(missing), os.cpu_count() or 1), mp_context=context) as processes:
            list(processes.map(_make, missing))
    return len(missing)


def _make(asked: Asked) -> None:
    """Makes one bill; a plan that is not possible is said again where it is priced."""
    try:
        bill(*asked)
    except (AutoparError, ValueError):
        return


def _path(shape: Shape, cluster: Cluster) -> Path | None:
    """Where a bill is kept; None where nothing is."""
    root, code = cache_root(os.environ), _code_hash()
    if root is None or code is None:
        return None
    data = msgspec.json.encode([code, dataclasses.asdict(shape), LAYERS, MICROBATCHES], order="sorted")
    digest = hashlib.sha256(data + cluster.to_json().encode())
    return root / "bills" / f"{digest.hexdigest()}.msgpack"


@functools.cache
def _code_hash() -> str | None:
    """Hash of what every bill depends on; None where the code is not in files."""
    code = environment_hash()
    if code is None:
        return None
    digest = hashlib.sha256(code.encode())
    for file in (*sorted(_EXAMPLES.glob("*.py")), Path(make_bill.__code__.co_filename), Path(__file__)):
        digest.update(file.read_bytes())
    digest.update(msgspec.json.encode(at_priors(load_constants()), order="sorted"))
    return digest.hexdigest()


def _encoded(whole: RunBill) -> bytes:
    return msgspec.msgpack.encode([list(map(list, rows)) for rows in _tables(whole)])


def _tables(whole: RunBill) -> Iterable[Iterable[Iterable[Any]]]:
    yield (_row(k) for k in whole.bill.kernels)
    yield (_row(m) for m in whole.bill.messages)
    yield (whole.layer, whole.ends)


def _row(line: Kernel | BilledMessage) -> list[Any]:
    """Values of a line's fields; products as their sizes."""
    values = [getattr(line, f.name) for f in dataclasses.fields(line)]
    return [[float(s) for s in _row_of(v)] if isinstance(v, Matrices) else v for v in values]


def _row_of(product: Matrices) -> list[Any]:
    return [getattr(product, f.name) for f in dataclasses.fields(product)]


def _decoded(data: bytes) -> RunBill:
    kernels, messages, (layer, ends) = msgspec.msgpack.decode(data)
    return RunBill(
        Bill(tuple(_kernel(row) for row in kernels), tuple(_message(row) for row in messages)),
        tuple(layer),
        tuple(ends),
    )


def _kernel(row: list[Any]) -> Kernel:
    values = dict(zip((f.name for f in dataclasses.fields(Kernel)), row, strict=True))
    values["product"] = Matrices(*values["product"]) if values["product"] is not None else None
    values["shapes"] = tuple(map(tuple, values["shapes"]))
    return Kernel(**values)


def _message(row: list[Any]) -> BilledMessage:
    values = dict(zip((f.name for f in dataclasses.fields(BilledMessage)), row, strict=True))
    values["span"] = msgspec.convert(values["span"], Span | None)
    return BilledMessage(**values)
