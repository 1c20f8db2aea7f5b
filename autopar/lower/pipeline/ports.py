"""`Port`: an array that programs pass on, with the layout in which it lies between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import partition_spec
from autopar.ir import Layout, TensorType
from autopar.lower.hosted import placed, to_host
from autopar.schedule import ValueRef


@dataclass(frozen=True)
class Port:
    """One argument or result of a stage program.

    Args:
        ref: which value it is; its text is the name of the value in the dataflow.
        type: its type, whole on the stage's mesh (of one microbatch where it is one's).
        layout: how it lies. A partial value is an array with one more dim in front: the terms, one a device.
        host: whether it lies in host memory between programs.
        stacked: whether it is a stack of microbatches' rows. The terms of a partial one are behind the stack's dim.
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
        """Bytes of one device's piece, on the device."""
        return 0 if self.host else self.layout.local_bytes(self.type, sizes)

    def enter(self, array: Any) -> Any:
        """The device's piece inside a program, of what `leave` made."""
        if not self.layout.partial:
            return array
        return array[:, 0] if self.stacked else array[0]

    def leave(self, array: Any) -> Any:
        """A device's piece as it leaves a program."""
        terms = array[:, None] if self.stacked else array[None]
        laid_out = terms if self.layout.partial else array
        return to_host(laid_out) if self.host else laid_out
