"""The interface of localizers. A localizer runs one primitive on one device's shards, inside a manual
``jax.shard_map``.

A rule says which dims may be split together; given operands in the layouts of one of its strategies, a
localizer makes the results in that strategy's result layouts. Most primitives run on shards as they run
on the whole. Those with sizes or positions in their parameters have a localizer of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.jaxprs import scalar_of
from autopar._compat.primitives import bind
from autopar.ir import Layout, Literal, Operator, TensorType
from autopar.lower.callbacks import Callbacks

#: Mesh axes, major first -> number of this shard among those that the axes make together: an int32 scalar.
AxisIndex: TypeAlias = Callable[[tuple[str, ...]], Any]


@dataclass(frozen=True)
class DeviceAxes:
    """An `AxisIndex` where the enclosing ``shard_map`` has parts of the mesh's axes.

    Args:
        parts: by axis of the mesh its parts there, major first.
        gathers: whether a permute is a gather of which each device keeps one shard. In a branch that some devices take
            alone XLA's CPU runtime waits in a permute for all devices of the program, and in a gather for its group.
    """

    parts: Mapping[str, tuple[str, ...]]
    gathers: bool = False

    def __call__(self, axes: tuple[str, ...]) -> Any:
        """Number of the device among those of ``axes``."""
        names = self.names(axes)
        return lax.axis_index(names) if names else jnp.int32(0)

    def names(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The parts of ``axes``."""
        return tuple(part for axis in axes for part in self.parts[axis])


def axis_names(index: AxisIndex, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Names of ``axes`` of the mesh in collectives.

    Args:
        index: which shard the device's is.
        axes: of the mesh.
    """
    return index.names(axes) if isinstance(index, DeviceAxes) else axes


def permuted(array: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], index: AxisIndex) -> Any:
    """The shard that this device receives, or zeros.

    Args:
        array: the shard that it sends.
        axes: of the mesh, over which devices are numbered, major first.
        pairs: (from, to) by number.
        index: which shard the device's is.
    """
    names = axis_names(index, axes)
    if not isinstance(index, DeviceAxes) or not index.gathers:
        return lax.ppermute(array, names, pairs)
    senders = [-1] * lax.axis_size(names)
    for sender, receiver in pairs:
        senders[receiver] = sender
    sender_here = jnp.asarray(senders, jnp.int32)[lax.axis_index(names)]
    shard = lax.dynamic_index_in_dim(lax.all_gather(array, names), jnp.maximum(sender_here, 0), keepdims=False)
    return jnp.where(sender_here < 0, jnp.zeros_like(shard), shard)


@dataclass(frozen=True)
class LocalContext:
    """Place of a device's shards.

    Args:
        sizes: size of each mesh axis by name.
        operand_types: types of the whole operands (global shapes).
        result_types: types of the whole results (global shapes).
        operand_layouts: layout of each operand; the arrays given are shards in it.
        result_layouts: layout that each result must get.
        index: which shard this is; inside ``jax.shard_map`` that of the device.
        send: runs a collective on a shard, in the order that the program around needs.
        skips_masked: whether an operator leaves out what its mask leaves empty.
        op: the operator in the graph; None where what runs is not of a graph.
        callbacks: how Python is called.
    """

    sizes: Mapping[str, int]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    index: AxisIndex = lax.axis_index
    send: Callable[[Callable[[Any], Any], Any], Any] = lambda permute, piece: permute(piece)
    skips_masked: bool = False
    op: Operator | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        return self.operand_layouts[index].local_shape(self.operand_types[index].shape, self.sizes)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""
        return self.result_layouts[index].local_shape(self.result_types[index].shape, self.sizes)

    def piece_start(self, dim_axes: tuple[str, ...], local_size: int) -> jax.Array:
        """Index in the whole dim of this device's first element: a traced int32 scalar.

        Args:
            dim_axes: mesh axes that split the dim, major first; none gives 0.
            local_size: elements of the dim on one device.
        """
        if not dim_axes:
            return jnp.zeros((), jnp.int32)
        index: jax.Array = self.index(dim_axes)
        return lax.mul(index, jnp.asarray(local_size, jnp.int32))

    def operand_start(self, index: int, dim: int) -> jax.Array:
        """Start of this device's shard in dim ``dim`` of an operand, in elements."""
        return self.piece_start(self.operand_layouts[index].dims[dim], self.operand_shape(index)[dim])

    def result_start(self, index: int, dim: int) -> jax.Array:
        """Start of this device's shard in dim ``dim`` of a result, in elements."""
        return self.piece_start(self.result_layouts[index].dims[dim], self.result_shape(index)[dim])

    @property
    def is_split(self) -> bool:
        """Whether some dim of an operand or a result is split."""
        return any(layout.axes for layout in (*self.operand_layouts, *self.result_layouts))


#: (primitive, its global parameters, local operands, context) -> local results.
Localizer: TypeAlias = Callable[[Primitive, Mapping[str, Any], list[Any], LocalContext], list[Any]]


def run_unchanged(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The localizer of primitives whose parameters hold for shards as they hold for the whole."""
    return bind(primitive, params, operands)


def as_bytes(collective: Callable[[Any], Any], array: Any) -> Any:
    """Runs a collective on an array, on 2-bit integers as bytes: XLA's CPU compiler has no such collectives."""
    wide = {"int2": jnp.int8, "uint2": jnp.uint8}.get(array.dtype.name)
    return collective(array) if wide is None else collective(array.astype(wide)).astype(array.dtype)


def scalar(literal: Literal) -> Any:
    """The numpy scalar of a literal."""
    return scalar_of(literal.text, literal.type.dtype)
