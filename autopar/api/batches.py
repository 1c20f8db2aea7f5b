"""Batches: which examples are this process's, one global batch of what every process has, and a smaller last batch.

`process_examples` and `local_batch` serve the methods of those names of `ParallelFunction`. `LastBatch` takes other
numbers of microbatches for a batch that the number does not divide, as the last one of a data set often is.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar._compat.devices import world_devices
from autopar._compat.meshes import device_mesh
from autopar._compat.world import world
from autopar.api.compiled import Compiled
from autopar.api.placement import default_placement
from autopar.errors import AutoparError
from autopar.ir import Graph
from autopar.microbatch import batch_size
from autopar.runtime.hosts.agree import Agreement, Fact
from autopar.runtime.hosts.arrays import empty

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class _Wanted:
    """Wanted shape and sharding of one array of a batch.

    Args:
        shape: of the global array.
        sharding: where it is to lie.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding


def process_examples(programs: Sequence[Compiled], batch: int | None) -> tuple[int, ...]:
    """Indices of the examples of a global batch that this process has to give to `local_batch`, increasing."""
    sizes: set[int] = set()
    rows: set[int] = set()
    for compiled in programs:
        records = compiled.plan.content.inputs
        for record, sharding, aval in zip(
            records, compiled.local.program.input_shardings, compiled.traced.signature.avals(), strict=False
        ):
            if record.role == "batch" and aval.ndim and batch in (None, aval.shape[0]):
                sizes.add(aval.shape[0])
                rows.update(own_rows(aval.shape, sharding))
        if sizes:
            break
    if len(sizes) == 1:
        return tuple(sorted(rows))
    if batch is None:
        raise AutoparError(
            "which examples are this process's is not known yet" if not sizes else f"batches have {sorted(sizes)} rows",
            cause="the step was not compiled, or its batch has arrays of several sizes",
            remedy="call .compile(shapes) first, or give the number of examples of a global batch",
        )
    (sharding,) = default_placement([jax.ShapeDtypeStruct((batch,), np.float32)], world_devices())
    return own_rows((batch,), sharding)


def local_batch(name: str, programs: Sequence[Compiled], tree: Any) -> Any:
    """Global arrays of a batch of which every process has its own examples; all processes call it together."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [np.asarray(leaf) for _, leaf in with_paths]
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    wanted = _of_plan(programs, paths, leaves) or _spread_evenly(paths, leaves)
    processes = world()
    if processes is None and not _fits(wanted, leaves):
        return jax.tree.map(jax.numpy.asarray, tree)  # all examples are here: a batch of its own size
    rows = _rows(wanted)
    wrong = [(p, a) for p, a, w in zip(paths, leaves, wanted, strict=True) if w.shape and len(a) != len(rows)]
    said = "as its plan wants"
    if wrong:
        said = f"{len(wrong[0][1])} examples of {wrong[0][0] or 'the batch'} where its plan wants {len(rows)}"
    if processes is not None:
        facts: list[Fact] = [("what a process has", said)]
        facts += [
            (f"array {p or 'batch'}", f"{a.dtype} of {list(w.shape)}")
            for p, a, w in zip(paths, leaves, wanted, strict=True)
        ]
        turn = Agreement.next(processes, f"local_batch of {name}")
        turn.compare(facts, _shared(paths, leaves, wanted, rows))
    if wrong:
        raise AutoparError(
            f"the batch has {said}",
            cause="the last batch of a data set is shorter",
            remedy="drop it, or pad it with examples that a mask leaves out of the loss; process_examples says which "
            "examples are this process's",
        )
    arrays = [
        from_rows(a, rows, w.shape, w.sharding) if w.shape else _everywhere(a, w)
        for a, w in zip(leaves, wanted, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def _of_plan(programs: Sequence[Compiled], paths: Sequence[str], leaves: Sequence[Any]) -> list[_Wanted] | None:
    """Places of these arrays in the batch of a plan, one for as many examples first; None where no plan has them."""
    wanted_by_program: list[list[_Wanted]] = []
    for compiled in programs:
        records, avals = compiled.plan.content.inputs, compiled.traced.signature.avals()
        shardings = compiled.local.program.input_shardings
        for start in range(len(avals) - len(leaves) + 1):
            window = range(start, start + len(leaves))
            if all(
                records[i].path.endswith(path) and _same_type(avals[i], leaf)
                for i, path, leaf in zip(window, paths, leaves, strict=True)
            ):
                wanted_by_program.append([_Wanted(avals[i].shape, shardings[i]) for i in window])
    return next((w for w in wanted_by_program if _fits(w, leaves)), wanted_by_program[0] if wanted_by_program else None)


def _same_type(aval: Any, leaf: Any) -> bool:
    """Whether an array has the type of a plan's input but for the number of examples."""
    return bool(aval.dtype == leaf.dtype and aval.ndim == leaf.ndim and aval.shape[1:] == leaf.shape[1:])


def _rows(wanted: Sequence[_Wanted]) -> list[int]:
    return sorted({r for w in wanted if w.shape for r in own_rows(w.shape, w.sharding)})


def _fits(wanted: Sequence[_Wanted], leaves: Sequence[Any]) -> bool:
    count = len(_rows(wanted))
    return all(len(a) == count for a, w in zip(leaves, wanted, strict=True) if w.shape)


def _spread_evenly(paths: Sequence[str], leaves: Sequence[Any]) -> list[_Wanted]:
    """Equal numbers of examples for all processes, in the order of the processes, where no plan says more."""
    count = jax.process_count()
    shapes = [jax.ShapeDtypeStruct((a.shape[0] * count, *a.shape[1:]) if a.ndim else (), a.dtype) for a in leaves]
    devices = world_devices()
    mesh = device_mesh([("d", len(devices))], devices)
    wanted = []
    for path, s in zip(paths, shapes, strict=True):
        if s.shape and s.shape[0] % len(devices) and count > 1:
            raise AutoparError(
                f"{path or 'the batch'} has {s.shape[0]} examples; {len(devices)} devices do not divide them",
                cause="the step was not compiled yet: a plan may want the batch in larger parts",
                remedy="call .compile(shapes) first",
            )
        even = s.shape and s.shape[0] % len(devices) == 0
        wanted.append(_Wanted(s.shape, NamedSharding(mesh, PartitionSpec("d") if even else PartitionSpec())))
    return wanted


def _shared(
    paths: Sequence[str], leaves: Sequence[Any], wanted: Sequence[_Wanted], rows: Sequence[int]
) -> dict[str, str]:
    """Checksums of rows that several processes have, by array and row."""
    differing: dict[str, str] = {}
    for path, array, w in zip(paths, leaves, wanted, strict=True):
        if not w.shape:
            differing[path] = str(array)
        elif len(array) == len(rows):
            at = {row: n for n, row in enumerate(rows)}
            for row in shared_rows(w.shape, w.sharding):
                data = np.ascontiguousarray(array[at[row]]).reshape(-1).view(np.uint8).data
                differing[f"example {row} of {path or 'the batch'}"] = f"{zlib.crc32(data):08x}"
    return differing


def _everywhere(array: Any, wanted: _Wanted) -> Any:
    return jax.make_array_from_callback((), wanted.sharding, lambda index: array[index])


def own_rows(shape: Sequence[int], wanted: NamedSharding) -> tuple[int, ...]:
    """Indices of the first dim of an array of which this process's devices have a part, rising."""
    rows: set[int] = set()
    for index in wanted.addressable_devices_indices_map(tuple(shape)).values():
        assert index is not None
        rows.update(range(*index[0].indices(shape[0])))
    return tuple(sorted(rows))


def shared_rows(shape: Sequence[int], wanted: NamedSharding) -> tuple[int, ...]:
    """Rows of an array (indices of its first dim) that this process holds and another process holds too, rising."""
    rows_here = set(own_rows(shape, wanted))
    here = wanted.addressable_devices
    rows_elsewhere: set[int] = set()
    for device, index in wanted.devices_indices_map(tuple(shape)).items():
        if device not in here:
            assert index is not None
            rows_elsewhere.update(range(*index[0].indices(shape[0])))
    return tuple(sorted(rows_here & rows_elsewhere))


def from_rows(local: Any, rows: Sequence[int], shape: Sequence[int], wanted: NamedSharding) -> Any:
    """The global array of which every process has some rows.

    Args:
        local: rows of this process, whole in all other dims.
        rows: their indices in the first dim, rising; all that its devices have a part of, perhaps more.
        shape: of the global array.
        wanted: where it is to lie.
    """
    array = np.asarray(local)
    if not wanted.addressable_devices:
        return empty(shape, wanted, array.dtype)
    at = {row: n for n, row in enumerate(rows)}

    def part(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        first, *rest = index
        rows_wanted = range(*first.indices(shape[0]))
        # Rows of one shard follow each other, and so do those that this process has of them.
        begin = at[rows_wanted[0]] if rows_wanted else 0
        return array[(slice(begin, begin + len(rows_wanted)), *rest)]

    return jax.make_array_from_callback(tuple(shape), wanted, part, dtype=array.dtype)


@dataclass
class LastBatch:
    """Numbers of microbatches for batches of other sizes than the first.

    Args:
        warned: whether it was said that a number was not possible.
    """

    warned: bool = False

    def counts(self, graph: Graph, asked: int, *, first: bool) -> list[int]:
        """Numbers of microbatches to try for a batch, the preferred one first.

        Args:
            graph: graph of the step, whose batch size counts.
            asked: the number that the user asked for.
            first: whether this is the first batch; then the number is ``asked`` and must divide it.
        """
        size = batch_size(graph)
        if first or size is None or size % asked == 0:
            return [asked]
        counts = counts_for(size, asked)
        if not self.warned:
            self.warned = True
            logger.warning(
                "%s: %d microbatches do not divide a batch of %d; such a call runs in %d (this is said once; drop the "
                "last batch of a data set or pad it to keep one program)",
                graph.name, asked, size, counts[0],
            )  # fmt: skip
        return counts


def counts_for(size: int, asked: int) -> list[int]:
    """Numbers of equal microbatches of a batch of ``size``: the highest up to ``asked``, then those above, rising."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    first = max(n for n in divisors if n <= asked)
    return [n for n in divisors if n >= first]
