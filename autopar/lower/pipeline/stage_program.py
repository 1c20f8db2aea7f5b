"""`StageProgram`: one program of a stage, for any mesh of its shape, and the ports that it takes and gives.

A `Port` is an array that programs pass on, with the layout in which it lies between them. `donated` names the
arguments that give their buffers to results: instruction lists never use them again. What the programs of a stage
compute is cut out in `autopar.lower.pipeline.programs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import partition_spec
from autopar.ir import Layout, TensorType
from autopar.lower.hosted import placed, to_host
from autopar.lower.localize.base import AxisIndex
from autopar.schedule import Apply, Program, Run, Send, ValueRef, Work


@dataclass(frozen=True)
class Port:
    """One argument or result of a stage program.

    Args:
        ref: which value it is; its text is the name of the value in the dataflow.
        type: its type, whole on the stage's mesh (of one microbatch where it is one's).
        layout: how it lies. A partial value is an array with one more dim in front: the terms, one a device.
        host: whether it lies in host memory between programs.
        stacked: whether it is a stack of microbatches' rows. The terms of a partial one are after the stack's dim.
    """

    ref: ValueRef
    type: TensorType
    layout: Layout
    host: bool = False
    stacked: bool = False

    @cached_property
    def name(self) -> str:
        """Name of the value in the dataflow."""
        return str(self.ref)

    @property
    def spec(self) -> PartitionSpec:
        """The array's partition."""
        spec: PartitionSpec = partition_spec(self.layout.dims)
        if not self.layout.partial:
            return spec
        padded = (*spec, *(None,) * (self.type.rank - len(spec)))
        at = int(self.stacked)
        return PartitionSpec(*padded[:at], self.layout.partial, *padded[at:])

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The array's sharding on ``mesh``."""
        return placed(mesh, self.spec, host=self.host)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the array, with the terms' dim."""
        if not self.layout.partial:
            return self.type.shape
        at, terms = int(self.stacked), math.prod(sizes[a] for a in self.layout.partial)
        return (*self.type.shape[:at], terms, *self.type.shape[at:])

    def local_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of one device's shard, on the device."""
        return 0 if self.host else self.layout.local_bytes(self.type, sizes)

    def enter(self, array: Any) -> Any:
        """The device's shard inside a program, of what `leave` made."""
        if not self.layout.partial:
            return array
        return array[:, 0] if self.stacked else array[0]

    def leave(self, array: Any) -> Any:
        """A device's shard as it leaves a program."""
        terms = array[:, None] if self.stacked else array[None]
        laid_out = terms if self.layout.partial else array
        return to_host(laid_out) if self.host else laid_out


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program of a stage, for any mesh of its shape.

    Args:
        work: kind of task, stage and slice that it runs.
        reads: its arguments.
        writes: its results.
        accumulates: further results: what this microbatch contributes, with how contributions are joined.
        on_device: (number of the microbatch, local shards of ``reads``, which shard the device's is) -> local shards of
            the results.
        compiler_options: options of XLA by name.
    """

    work: Work
    reads: tuple[Port, ...]
    writes: tuple[Port, ...]
    accumulates: tuple[tuple[Port, str], ...]
    on_device: Callable[[Any, Sequence[Any], AxisIndex], list[Any]]
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[Port, ...]:
        """All that it returns, in order."""
        return (*self.writes, *(p for p, _ in self.accumulates))

    def jitted(self, mesh: Mesh, donated: Sequence[int] = ()) -> Any:
        """The program on a mesh: takes the microbatch's number and the arrays of ``reads``, returns a tuple.

        Args:
            mesh: the devices.
            donated: indices of the ``reads`` whose buffers it may write results into.
        """

        def body(number: Any, *arrays: Any) -> tuple[Any, ...]:
            microbatch_inputs = [p.enter(a) for p, a in zip(self.reads, arrays, strict=True)]
            outputs = self.on_device(number, microbatch_inputs, jax.lax.axis_index)
            return tuple(p.leave(_array(m)) for p, m in zip(self.results, outputs, strict=True))

        body.__name__ = str(self.work).replace(" ", "_")
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(jax.sharding.PartitionSpec(), *(p.spec for p in self.reads)),
            out_specs=tuple(p.spec for p in self.results),
            check_vma=False,
        )
        return jax.jit(
            mapped,
            in_shardings=(
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
                *(p.sharding(mesh) for p in self.reads),
            ),
            out_shardings=tuple(p.sharding(mesh) for p in self.results),
            donate_argnums=tuple(n + 1 for n in donated),
            compiler_options=dict(self.compiler_options) or None,
        )


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def given_up(program: Program, worker: int) -> Mapping[Work, frozenset[str]]:
    """Values that a worker never uses again after a work, by work.

    What it sends stays out: the value may still be on its way when the work runs.

    Args:
        program: instruction lists that `autopar.schedule.verify` accepts.
        worker: its number.
    """
    lines = program.workers[worker].instructions
    sent = {i.value.value for i in lines if isinstance(i, Send)}
    donated: dict[Work, frozenset[str]] = {}
    for i in lines:
        if isinstance(i, Run | Apply):
            names = frozenset(b.value for b in i.donate) - sent
            donated[i.work] = donated.get(i.work, names) & names
    return donated


def given_up_by_all(program: Program, stages: Sequence[Sequence[int]], work: Work) -> frozenset[str]:
    """Values that no worker which runs a work uses again when it has run it.

    Args:
        program: instruction lists that `autopar.schedule.verify` accepts.
        stages: by worker the stages that it holds.
        work: of one of them.
    """
    holders = [w for w, held_stages in enumerate(stages) if work.stage in held_stages]
    return frozenset.intersection(*(given_up(program, w).get(work, frozenset()) for w in holders))


def donated(program: StageProgram, names: Set[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of the arguments whose buffers become results: given up, and each with a result just like it.

    Args:
        program: of a stage.
        names: values that are given up.
        sizes: sizes of the mesh axes.
    """
    free = [kind_of(p, sizes) for p in program.results]
    positions = []
    for n, port in enumerate(program.reads):
        kind = kind_of(port, sizes)
        alone = sum(p.name == port.name for p in program.reads) == 1
        if port.name in names and alone and kind in free:
            free.remove(kind)
            positions.append(n)
    return tuple(positions)


def kind_of(port: Port, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], str, Sequence[object], bool]:
    """Shape, dtype and partition of the array of a port, and whether it is in host memory."""
    spec = tuple(port.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return port.shape(sizes), port.type.dtype, spec, port.host
