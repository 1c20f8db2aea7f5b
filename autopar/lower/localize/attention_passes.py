"""The passes of attention in blocks on one device, in which keys and values travel along a ring.

A row keeps its largest score m so far, the sum l of the exponentials and the weighted sum of the values, which are
scaled down when a larger score comes (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe
and Staats, 2021). It leaves m + log l, from which the backward pass has the probabilities of any block again. There the
gradients of keys and values travel with them and are at home after as many steps as there are devices (Liu et al.,
"Ring Attention with Blockwise Transformers", 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import jax_dtype
from autopar.lower.barriers import not_before
from autopar.lower.localize.blocks import Core, aligned


def wide(dtype: Any) -> Any:
    """Dtype in which sums of a dtype are kept between blocks."""
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def over_blocks(core: Core, block: Callable[[Any, Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
    """Runs ``block(state, number)`` for each block of keys on the device; returns the state and the stacked results."""
    if core.blocks == 1:
        state, left = block(state, jnp.int32(0))
        return state, [a[None] for a in left]
    return lax.scan(block, state, jnp.arange(core.blocks, dtype=jnp.int32))


@dataclass(eq=False)
class Ring:
    """Keys and values of ring attention, which each device passes on to the next.

    Args:
        core: the operator on one device.
        here: keys and values that the device has now.
    """

    core: Core
    here: Sequence[Any]

    def steps(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Each step of the ring with the device's keys and values in it; those of the next step are sent meanwhile."""
        for step in range(self.core.devices):
            now = self.here
            if step < self.core.devices - 1:
                self.here = self.core.passed_on(now)
            yield step, now

    def hold(self, computed: Any) -> None:
        """Sends the keys and values of a step on only after ``computed``: at most two steps' are on the device."""
        self.here = [not_before(a, computed) for a in self.here]


@dataclass(frozen=True, eq=False)
class Forward:
    """Forward pass of attention in blocks on one device, by a running softmax."""

    core: Core

    def run(self) -> list[Any]:
        """The result, and the log-sum-exp of each row."""
        core = self.core
        rows, shape = core.context.result_shape(1), core.context.result_shape(0)
        state, ring = self.start(rows, shape), Ring(core, core.operands[1:3])
        for step, here in ring.steps():
            state, _ = over_blocks(core, self.block(here, core.first_block(step)), state)
            ring.hold(state[2])
        return self.finished(state)

    def start(self, rows: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """The state before any block: largest scores, sums of exponentials, weighted sums of values.

        Args:
            rows: shape of what each row has one of.
            shape: of the result.
        """
        softmax, result = self.dtypes
        return jnp.full(rows, -jnp.inf, softmax), jnp.zeros(rows, softmax), jnp.zeros(shape, wide(result))

    def finished(self, state: Any) -> list[Any]:
        """The result and the logarithms, from the state after all blocks."""
        largest, total, weighted = state
        out = weighted / self.like_result(total).astype(weighted.dtype)
        return [out.astype(self.dtypes[1]), _finite(largest) + jnp.log(total)]

    @property
    def dtypes(self) -> tuple[Any, Any]:
        """Dtypes of the softmax and of the result."""
        result, softmax = (jax_dtype(t.dtype) for t in self.core.context.result_types)
        return softmax, result

    def like_result(self, rows: Any) -> Any:
        """A value with one element a row, in the order of the result's dims."""
        spec = self.core.spec
        return aligned(rows, spec.sums, spec.results[0])

    def block(self, here: Sequence[Any], first: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
        """A function that adds one block of keys and values to the state of the softmax.

        Args:
            here: keys and values of the device in this step.
            first: number of their first block among all.
        """
        core, spec = self.core, self.core.spec

        def run(state: Any, number: Any) -> tuple[Any, Any]:
            largest, total, weighted = state
            keys, values = (core.cut(a, spec.operands[n], number) for n, a in enumerate(here, 1))
            x = scores_of(core, keys, first + number)
            dim = spec.scores.index(spec.keys)
            after = jnp.maximum(largest, jnp.max(x, dim))
            shift = _finite(after)
            p = jnp.exp(x - jnp.expand_dims(shift, dim))
            kept = jnp.exp(largest - shift)
            labels = (spec.scores, spec.operands[2], spec.results[0])
            more = core.product(p.astype(core.dtype("probabilities")), values, labels, weighted.dtype)
            weighted = weighted * self.like_result(kept).astype(weighted.dtype) + more
            return (after, total * kept + jnp.sum(p, dim), weighted), []

        return run


def _finite(largest: Any) -> Any:
    """Offset of the scores of a row: the largest one, or 0 where all are left out."""
    return jnp.where(jnp.isneginf(largest), jnp.zeros_like(largest), largest)


def scores_of(core: Core, keys: Any, block: Any) -> Any:
    """Operand of the softmax in one block, its dims in the order of the scores."""
    return softmax_operand(core, raw_scores(core, keys), block)


def raw_scores(core: Core, keys: Any) -> Any:
    """Queries times the keys of a block."""
    spec = core.spec
    scores = core.params["regions"]["scores"].graph.inputs[0].type
    labels = (spec.operands[0], spec.operands[1], spec.scores)
    return core.product(core.operands[0], keys, labels, jax_dtype(scores.dtype))


def softmax_operand(core: Core, scores: Any, block: Any) -> Any:
    """Operand of the softmax, from the product of queries and keys."""
    (x,) = core.region("scores", {"scores": scores}, block)
    return aligned(x, core.spec.softmax, core.spec.scores)


@dataclass(frozen=True, eq=False)
class Backward:
    """Backward pass of attention in blocks on one device, which computes scores again."""

    core: Core

    def run(self) -> list[Any]:
        """The gradients of queries, keys and values, as far as they are asked for."""
        core, spec = self.core, self.core.spec
        _, keys, values, _, _, gradient = core.operands[:6]
        # Else a compiler takes what came by in the forward pass, and keeps all keys from there to here.
        ring = Ring(core, [not_before(a, gradient) for a in (keys, values)])
        along = self.along()
        dtypes = [jax_dtype(t.dtype) for t in core.context.result_types]
        sums = {
            which: jnp.zeros(core.context.result_shape(n), wide(dtypes[n])) for n, which in enumerate(spec.gradients)
        }
        of_queries = [sums[0]] if 0 in sums else []
        travelling = [w for w in (1, 2) if w in sums]
        for step, here in ring.steps():
            run = self.block(here, core.first_block(step), along, travelling)
            of_queries, stacked = over_blocks(core, run, of_queries)
            for which, blocks in zip(travelling, stacked, strict=True):
                sums[which] = sums[which] + self.joined(blocks, which)
            ring.hold((*of_queries, *(sums[w] for w in travelling))[0])
            if core.devices > 1:
                sums.update(zip(travelling, core.passed_on([sums[w] for w in travelling]), strict=True))
        if of_queries:
            (sums[0],) = of_queries
        return [sums[which].astype(dtypes[n]) for n, which in enumerate(spec.gradients)]

    def along(self) -> Any:
        """The result times its gradient, summed over each row: the term that all scores of the row share."""
        core, spec = self.core, self.core.spec
        softmax = jax_dtype(core.context.operand_types[4].dtype)
        labels = (spec.operands[3], spec.operands[5], spec.sums)
        result, gradient = (core.operands[n].astype(softmax) for n in (3, 5))
        return core.product(result, gradient, labels, softmax)

    def joined(self, blocks: Any, which: int) -> Any:
        """Gradients of all keys that the device has now, from those of each block."""
        dim = self.core.spec.results[self.core.spec.gradients.index(which)].index(self.core.spec.keys)
        moved = jnp.moveaxis(blocks, 0, dim)
        return moved.reshape((*moved.shape[:dim], -1, *moved.shape[dim + 2 :]))

    def block(
        self, here: Sequence[Any], first: Any, along: Any, travelling: Sequence[int]
    ) -> Callable[[Any, Any], tuple[Any, Any]]:
        """One block of keys and values: the gradient of the queries with it, and those of the keys and values."""
        core, spec = self.core, self.core.spec
        queries, gradient, logs = core.operands[0], core.operands[5], core.operands[4]
        dim = spec.scores.index(spec.keys)
        types = dict(zip(spec.gradients, core.context.result_types, strict=True))
        loops = dict(zip(spec.gradients, spec.results, strict=True))

        def run(of_queries: Any, number: Any) -> tuple[Any, Any]:
            keys, values = (core.cut(a, spec.operands[n], number) for n, a in enumerate(here, 1))
            scores = raw_scores(core, keys)
            x = softmax_operand(core, scores, first + number)
            p = jnp.exp(x - jnp.expand_dims(logs, dim))
            of_p = core.product(
                gradient, values, (spec.operands[5], spec.operands[2], spec.scores), core.dtype("seen")
            ).astype(p.dtype)
            slope = aligned(p * (of_p - jnp.expand_dims(along, dim)), spec.scores, spec.slope)
            slopes = self.slopes(scores, slope, first + number)
            if 0 in slopes:
                labels = (spec.scores, spec.operands[1], loops[0])
                of_queries = [of_queries[0] + core.product(slopes[0], keys, labels, of_queries[0].dtype)]
            left = []
            for which in travelling:
                square = slopes[1] if which == 1 else p.astype(core.dtype("weights"))
                other, n = (queries, 0) if which == 1 else (gradient, 5)
                sums = wide(jax_dtype(types[which].dtype))
                left.append(core.product(square, other, (spec.scores, spec.operands[n], loops[which]), sums))
            return of_queries, left

        return run

    def slopes(self, scores: Any, slope: Any, block: Any) -> dict[int, Any]:
        """The gradients of the scores that those of queries (0) and keys (1) are made of, as scores lie."""
        core, spec = self.core, self.core.spec
        wanted = [which for which in spec.gradients if which != 2]
        if not wanted:
            return {}
        slopes = core.region("gradient", {"scores": scores, "slope": slope.astype(self.slope_dtype)}, block)
        outputs = [str(o.operand) for o in core.params["regions"]["gradient"].graph.outputs]
        return {
            which: aligned(a, core.labels_in("gradient", name), spec.scores)
            for which, a, name in zip(wanted, slopes, outputs, strict=True)
        }

    @property
    def slope_dtype(self) -> Any:
        """The dtype in which the gradient of the softmax's operand is taken on."""
        inputs = self.core.params["regions"]["gradient"].graph.inputs
        return jax_dtype(next(i.type.dtype for i in inputs if i.name == "slope"))
