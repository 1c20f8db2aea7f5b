"""`Core`: ring attention on one device, which has the keys and values of one device at a time.

Queries and keys of a sequence are split over the n devices of a ring. In n steps the blocks of keys of all devices come
by: after each step a collective-permute passes them on to the next device. The operators from scores to softmax run on
each block as they run on all keys, masks by position included, for an operator in a block knows the block's number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import jax_dtype
from autopar.frontend import BoundGraph
from autopar.ir import Layout, Literal
from autopar.ir.blockwise import AttentionSpec
from autopar.ir.blockwise.spec import Labels, labels_of
from autopar.lower.localize.base import AxisIndex, LocalContext, permuted, run_unchanged, scalar
from autopar.lower.localize.shape import LOCALIZERS as POSITIONS

# The axes that blocks of keys, and halves of rows, are on, where operators of regions ask which they make.
_KEYS = "keys of a block"
_ROWS = "rows of a half"


@dataclass(frozen=True)
class _BlockIndex:
    """An `AxisIndex` inside of a block: which block of keys, which half of the rows, or which shard the device's is."""

    block: Any
    part: Any
    outside: AxisIndex

    def __call__(self, axes: tuple[str, ...]) -> Any:
        """Number of the block, of the half, or of the device among those of ``axes``."""
        return self.block if axes == (_KEYS,) else self.part if axes == (_ROWS,) else self.outside(axes)


@dataclass(frozen=True, eq=False)
class Core:
    """The operators from scores to softmax to values of one attention, on one device.

    Args:
        params: of the operator, from `autopar.lower.rewrites`.
        operands: local shards of queries, keys, values and what else is read, as masks.
        context: the device's mesh and the layouts of the operands.
        part: which half of the rows of queries ``operands`` have, counted over all devices; None where they have all
            rows of the device. Keys and values are halves then too.
    """

    params: Mapping[str, Any]
    operands: Sequence[Any]
    context: LocalContext
    part: Any = None

    @cached_property
    def spec(self) -> AttentionSpec:
        """Loops of its operands and results."""
        return AttentionSpec.of(self.params["operator"])

    @cached_property
    def axes(self) -> dict[int, tuple[str, ...]]:
        """Mesh axes that split each loop; that of the keys as the keys themselves are split."""
        pairs = zip(self.spec.operands[:3], self.context.operand_layouts, strict=False)
        return {i: axes for labels, k in pairs for i, axes in zip(labels, k.dims, strict=True) if i is not None}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Size of each loop on this device."""
        return self.spec.sizes([jnp.shape(o) for o in self.operands[:3]])

    @cached_property
    def ring(self) -> tuple[str, ...]:
        """Mesh axes along which keys and values travel."""
        return self.axes[self.spec.keys]

    @cached_property
    def devices(self) -> int:
        """Devices of the ring."""
        return math.prod(self.context.sizes[a] for a in self.ring)

    @cached_property
    def block(self) -> int:
        """Keys of a block."""
        return self.spec.block_keys(self.sizes)

    @cached_property
    def blocks(self) -> int:
        """Blocks of the keys that a device has at a time."""
        return self.sizes[self.spec.keys] // self.block

    def dtype(self, name: str) -> Any:
        """The dtype that an attribute of the operator names."""
        return jax_dtype(str(self.params["operator"].attr(name)))

    def first_block(self, step: int) -> Any:
        """Number, among all blocks of keys, of the first that is here in a step."""
        if not self.ring:
            return jnp.int32(0)
        count = jnp.int32(self.devices)
        owner = lax.rem(self.context.index(self.ring) + count - jnp.int32(step), count)
        return owner * jnp.int32(self.blocks)

    def passed_on(self, arrays: Sequence[Any]) -> list[Any]:
        """Each array's value on the previous device."""
        pairs = [(n, (n + 1) % self.devices) for n in range(self.devices)]
        return [self.context.send(lambda a: permuted(a, self.ring, pairs, self.context.index), a) for a in arrays]

    def cut(self, array: Any, labels: Labels, block: Any) -> Any:
        """One block of an array along its loop of keys."""
        if self.spec.keys not in labels or array.shape[labels.index(self.spec.keys)] == self.block:
            return array
        dim = labels.index(self.spec.keys)
        return lax.dynamic_slice_in_dim(array, block * jnp.int32(self.block), self.block, dim)

    def product(self, a: Any, b: Any, labels: tuple[Labels, Labels, Labels], dtype: Any) -> Any:
        """The product of two arrays whose dims are loops, summed over those that the result has not."""
        plain = [[i for i in k if i is not None] for k in labels]
        whole = jnp.einsum(
            _squeezed(a, labels[0]), plain[0], _squeezed(b, labels[1]), plain[1], plain[2],
            preferred_element_type=dtype, precision=self.params["precision"],
        )  # fmt: skip
        return aligned(whole, tuple(plain[2]), labels[2])

    def region(self, name: str, given: Mapping[str, Any], block: Any) -> list[Any]:
        """Results of a region of the attention operator, as its mask or its softmax, for one block of keys.

        Args:
            name: of the region.
            given: by name its inputs that the attention operator computes, as scores. Its other inputs are operands.
            block: number of the block among all keys.
        """
        bound: BoundGraph = self.params["regions"][name]
        graph, spec = bound.graph, self.spec
        halves = self.devices * (1 if self.part is None else 2)
        sizes = {**self.context.sizes, _KEYS: halves * self.blocks, _ROWS: halves}
        index = _BlockIndex(block, self.part, self.context.index)
        labels, env = {"scores": spec.scores, "slope": spec.slope}, dict(given)
        for n, at in enumerate(self._foreign(name)):
            labels[f"in.{n}"] = spec.operands[at]
            env[f"in.{n}"] = self.cut(self.operands[at], spec.operands[at], block)
        for op in graph.operators:
            result = op.results[0]
            labels[result.name] = labels_of(op)
            layouts = [self._layout(labels[o]) if isinstance(o, str) else Layout.replicated(0) for o in op.operands]
            context = LocalContext(
                sizes,
                graph.operand_types(op),
                (result.type,),
                tuple(layouts),
                (self._layout(labels[result.name]),),
                index,
            )
            taken = [scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands]
            known = bound.bounds[op.id]
            run = POSITIONS.get(known.primitive.name, run_unchanged)
            (env[result.name],) = run(known.primitive, known.params, taken, context)
        return [env[str(o.operand)] for o in graph.outputs]

    def labels_in(self, region: str, name: str) -> Labels:
        """Loops of the dims of a result of a region."""
        whole = self.params["regions"][region].graph.producers.get(name)
        return labels_of(whole) if whole is not None else self.spec.slope if name == "slope" else self.spec.scores

    def _foreign(self, name: str) -> range:
        """Indices of the operands that the region ``name`` takes from outside; those of the scores come first."""
        regions = self.params["regions"]
        counts = {k: sum(i.name.startswith("in.") for i in b.graph.inputs) for k, b in regions.items()}
        first = len(self.operands) - sum(counts.values())
        start = first if name == "scores" else first + counts["scores"]
        return range(start, start + counts[name])

    def _layout(self, labels: Labels) -> Layout:
        """Layout of a block of a value, along the axis of blocks too."""
        axes = {**self.axes, self.spec.keys: (_KEYS,)}
        if self.part is not None and self.spec.rows is not None:
            axes[self.spec.rows] = (_ROWS,)
        return Layout(tuple(() if i is None else axes.get(i, ()) for i in labels))


def aligned(array: Any, labels: Labels, wanted: Labels) -> Any:
    """An array with its dims in another order, and dims of one element for loops that it has not.

    Args:
        array: any.
        labels: of its dims; dims without one have one element.
        wanted: all of them, and others.
    """
    plain = [i for i in labels if i is not None]
    order = [plain.index(i) for i in wanted if i in plain and i is not None]
    moved = jnp.transpose(_squeezed(array, labels), order)
    shape = iter(moved.shape)
    return moved.reshape([next(shape) if i is not None and i in plain else 1 for i in wanted])


def _squeezed(array: Any, labels: Labels) -> Any:
    return array.reshape([n for n, i in zip(array.shape, labels, strict=True) if i is not None])
