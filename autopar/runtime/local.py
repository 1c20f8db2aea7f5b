"""One compiled program on this process's devices: arguments are placed, then XLA runs."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar._compat.xla import leave_uncommitted
from autopar.frontend import Traced
from autopar.frontend.signature import leaf_entry
from autopar.ir.analysis import unread_inputs
from autopar.lower.program import LoweredProgram
from autopar.runtime.hosts.agree import wait_s
from autopar.runtime.hosts.arrays import copied, is_global, own, put, spread
from autopar.runtime.hosts.callbacks import check_callbacks
from autopar.runtime.hosts.connections import open_connections
from autopar.runtime.launches import LAUNCHES, runnable
from autopar.runtime.leaves import PlacedLeaves, check_data, check_donated, give_up
from autopar.runtime.loaded import LoadedStep, described_inputs
from autopar.schedule import Work


@dataclass(frozen=True, eq=False)
class LocalProgram(LoadedStep):
    """A compiled program.

    Args:
        program: what was compiled.
        executable: jax's compiled object.
        placed_leaves: which inputs were last found to lie as wanted.
        unread: indices of inputs that nothing reads; they stay where they lie.
        moved: by input the array that was last moved, and what it became: a batch that is given again is not moved
            again. Both go when the caller lets go of the first.
        uncommitted: whether the executable returns arrays that are bound to no device, as on one device `jax.jit` does.
    """

    program: LoweredProgram
    executable: Any
    placed_leaves: PlacedLeaves
    unread: frozenset[int] = frozenset()
    moved: dict[int, tuple[weakref.ref[Any], Any]] = field(default_factory=dict)
    uncommitted: bool = False
    worker_memory = ()

    @cached_property
    def smallest(self) -> int | None:
        """Number of the smallest result, by which the next program waits for this one; None where it need not wait."""
        shardings = self.program.output_shardings
        devices: set[Any] = set(shardings[0].device_set) if shardings else set()
        if len(devices) < 2 or any(d.platform != "cpu" for d in devices):
            return None
        sizes = [math.prod(info.shape) for info in self.executable.out_info]
        return sizes.index(min(sizes))

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the program needs: arguments, results that reuse none of them, temporaries.

        Without what is in host memory; on CPUs, where that is the same memory, it is taken off what XLA counts.
        """
        m = self.executable.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
        return int(held - (0 if m.host_argument_size_in_bytes else self.program.host_bytes))

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        placed = list(leaves)
        for i in self.placed_leaves.others(leaves):
            leaf = leaves[i]
            if isinstance(leaf, jax.core.Tracer) or leaf_entry(leaf, False) != self.entries[i]:
                return None
            placed[i] = self._place(i, leaf)
        return placed

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, of the right shapes and dtypes, placed."""
        return [self._place(i, leaf) for i, leaf in enumerate(leaves)]

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function``, each placed as the step's input of the same place in ``inputs`` is."""
        arrays = jax.jit(function)(*arguments)
        return [jax.device_put(a, self.program.input_shardings[n]) for a, n in zip(arrays, inputs, strict=True)]

    def timed(self, note: Callable[[Work, float], None]) -> LocalProgram:
        """This program: it has no parts to time."""
        return self

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step; see `autopar.runtime.loaded.LoadedProgram`."""
        with LAUNCHES.of(self):
            if self.donated:
                check_donated(leaves, self.names, self.donated)
                self._separate(placed)
            try:
                result: Sequence[Any] = self.executable(*placed, *self.constants)
            except Exception:
                check_donated(leaves, self.names, set(range(len(leaves))) - set(self.donated))
                raise
            if self.donated:
                give_up(leaves, self.donated)
            if self.smallest is not None:
                smallest = result[self.smallest]
                LAUNCHES.launched([smallest])
                LAUNCHES.follow(frozenset(smallest.sharding.device_set), [smallest])
        check_callbacks(self.program.callbacks, result)
        if self.uncommitted and self._any_committed(leaves):
            return [jax.device_put(r, r.sharding) for r in result]
        return result

    def _any_committed(self, leaves: Sequence[Any]) -> bool:
        """Whether an argument that is read is bound to a device, so that the results are."""
        return any(
            isinstance(leaf, jax.Array) and leaf.committed and i not in self.unread for i, leaf in enumerate(leaves)
        )

    def _separate(self, placed: list[Any]) -> None:
        """Copies donated arrays that are given twice: a buffer can be given up once."""
        if len(set(map(id, placed))) == len(placed):
            return
        count: dict[int, int] = {}
        for x in placed:
            count[id(x)] = count.get(id(x), 0) + 1
        for i in self.donated:
            x = placed[i]
            if count[id(x)] > 1:
                count[id(x)] -= 1
                placed[i] = copied(x)

    def _place(self, index: int, leaf: Any) -> Any:
        check_data(leaf, self.names[index])
        wanted = self.program.input_shardings[index]
        if isinstance(leaf, jax.Array):
            if index in self.unread:  # jax leaves it out of the compiled program
                return leaf
            if leaf.sharding == wanted or leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                self.placed_leaves.note(index, leaf)
                return leaf
            if wanted.is_fully_addressable or is_global(leaf):
                return self._moved(index, leaf)
        if not wanted.is_fully_addressable:
            return spread(leaf, self.entries[index][1], wanted)
        return jax.device_put(own(leaf, self.entries[index][1]), wanted)

    def _moved(self, index: int, leaf: Any) -> Any:
        """An array of another place where the program wants it."""
        wanted = self.program.input_shardings[index]
        if index in self.donated:
            if _by_host(leaf, wanted):
                return jax.device_put(_host_copy(leaf), wanted)
            placed = jax.device_put(leaf, wanted)
            # On a device where the array lies already both share a buffer, and another argument may be the same array.
            return copied(placed) if leaf.sharding.device_set & wanted.device_set else placed
        known = self.moved.get(index)
        if known is not None and known[0]() is leaf and not known[1].is_deleted():
            return known[1]
        placed = jax.device_put(_host_copy(leaf) if _by_host(leaf, wanted) else leaf, wanted)
        self.moved[index] = weakref.ref(leaf, partial(_forget, self.moved, index)), placed
        return placed


def _by_host(leaf: jax.Array, wanted: jax.sharding.Sharding) -> bool:
    """Whether numpy moves an array: on CPUs jax compiles a program for each shape that it slices."""
    platforms = {d.platform for d in (*leaf.sharding.device_set, *wanted.device_set)}
    return (
        platforms == {"cpu"}
        and leaf.is_fully_addressable
        and leaf.is_fully_replicated
        and wanted.memory_kind == leaf.sharding.memory_kind
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def _host_copy(leaf: jax.Array) -> np.ndarray[Any, Any]:
    """A numpy copy; the array keeps no view of itself, which would block its donation."""
    return np.array(leaf.addressable_shards[0].data)


def _forget(moved: dict[int, tuple[weakref.ref[Any], Any]], index: int, source: weakref.ref[Any]) -> None:
    """Drops what an array was moved to when the array is gone, unless another took its place."""
    if index in moved and moved[index][0] is source:
        del moved[index]


def load_local(traced: Traced, program: LoweredProgram, donated: Sequence[int] = ()) -> LocalProgram:
    """Compiles a program for this process's devices and places what it closes over.

    Args:
        traced: the function.
        program: its lowered form.
        donated: indices of the inputs that the caller gives up (those of ``program`` where the plan has them).
    """
    with warnings.catch_warnings():
        # Of a donated batch, or a leaf that another layout replaces; it is deleted all the same.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        shapes = program.shapes(traced)
        compiled = program.function.lower(*shapes).compile(dict(program.compiler_options))
    assert isinstance(program.mesh, Mesh), "a program without devices is compiled for devices"
    open_connections([program.mesh])
    program.callbacks.limit_s = wait_s()
    count = len(traced.signature.traced)
    constants = tuple(
        put(copied(c), s) for c, s in zip(traced.closed_over, program.input_shardings[count:], strict=True)
    )
    runs = runnable(program.function, compiled, [s.dtype for s in shapes])
    return LocalProgram(
        *described_inputs(traced, {*donated, *(i for i in program.donated if i < count)}),
        constants,
        program,
        runs,
        PlacedLeaves(count),
        unread_inputs(traced.graph) - set(donated),
        uncommitted=program.mesh.size == 1 and runs is compiled and leave_uncommitted(compiled),
    )
