"""`Layout`: how a tensor lies on a logical mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.types import TensorType


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Mesh axes by tensor dim, and the mesh axes over which the tensor is a partial result.

    Args:
        dims: for each dim of the tensor the mesh axes that split it, major first; ``()`` is whole.
        partial: mesh axes (in mesh order) over which each device holds one term of a reduction; the
            true value is the reduction over them of what the devices hold.
        reduce: the reduction: "sum", "max", "min", "and" or "or". "sum" where ``partial`` is empty.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduce: str = "sum"

    @staticmethod
    def replicated(rank: int) -> Layout:
        """Every device holds the whole tensor of ``rank`` dims."""
        return Layout(((),) * rank)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole, final value."""
        return not self.partial and not any(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split some dim, in dim order."""
        return tuple(a for dim in self.dims for a in dim)

    def slice(self) -> Layout:
        """Layout of the slices of a stack along its first dim, which no axis splits."""
        return Layout(self.dims[1:], self.partial, self.reduce)

    def stack(self) -> Layout:
        """Layout of a stack, along a new first dim, of slices that lie so."""
        return Layout(((), *self.dims), self.partial, self.reduce)

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Number of different shards; ``sizes`` maps a mesh axis to its size."""
        return math.prod(sizes[a] for a in self.axes)

    def local_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor of ``shape``."""
        return tuple(n // math.prod(sizes[a] for a in dim) for n, dim in zip(shape, self.dims, strict=True))

    def local_bytes(self, type: TensorType, sizes: Mapping[str, int]) -> int:
        """Bytes of one device's shard of a tensor of ``type``."""
        return math.ceil(type.nbytes / self.shards(sizes))

    def fits(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Whether the axes of every dim divide it."""
        return len(shape) == len(self.dims) and all(
            n % math.prod(sizes[a] for a in dim) == 0 for n, dim in zip(shape, self.dims, strict=True)
        )

    def __str__(self) -> str:
        """Compact text: ``[x,.,y+x]``; ``.`` is whole; ``[.,y]+sum(x)`` is partial over x."""
        inner = ",".join("+".join(d) if d else "." for d in self.dims)
        tail = f"+{self.reduce}({','.join(self.partial)})" if self.partial else ""
        return f"[{inner}]{tail}"

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that prints as ``text``. Raises ValueError on anything else."""
        body, closed, tail = text.partition("]")
        if not body.startswith("[") or not closed:
            raise ValueError(f"not a layout: {text!r}")
        inner = body[1:]
        dims = tuple(() if d == "." else tuple(d.split("+")) for d in inner.split(",")) if inner else ()
        if not tail:
            return Layout(dims)
        if not (tail.startswith("+") and tail.endswith(")") and "(" in tail):
            raise ValueError(f"not a layout: {text!r}")
        reduce, _, axes = tail[1:-1].partition("(")
        return Layout(dims, tuple(axes.split(",")), reduce)
