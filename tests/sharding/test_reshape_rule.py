"""The reshape rule, by cutting numpy arrays: reshaped pieces are pieces of the reshaped whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.cluster.mesh import Link, LogicalMesh
from autopar.ir import Layout, Operator, TensorType, Value
from autopar.sharding import rule_for, strategies
from autopar.sharding.rules.reshape import groups

Shape = tuple[int, ...]
MESH = LogicalMesh((("x", 2), ("y", 3), ("z", 2)), (Link(1e9, 0.0),) * 3)


def reshape(source: Shape, target: Shape) -> Operator:
    attrs = (("dimensions", None), ("new_sizes", target))
    return Operator("reshape.0", "reshape", ("a",), (Value("b", TensorType(target, "f32")),), attrs)


def piece(whole: np.ndarray, layout: Layout, where: Mapping[str, int], sizes: Mapping[str, int]) -> np.ndarray:
    """The part of ``whole`` on the device at ``where``."""
    cuts = []
    for n, axes in zip(layout.local_shape(whole.shape, sizes), layout.dims, strict=True):
        index = 0
        for a in axes:
            index = index * sizes[a] + where[a]
        cuts.append(slice(index * n, (index + 1) * n))
    return whole[tuple(cuts)]


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3]), max_size=7))

    def merged() -> Shape:
        cuts = [draw(st.booleans()) for _ in primes]
        dims: list[int] = [1] * draw(st.integers(0, 1))
        for p, cut in zip(primes, cuts, strict=True):
            if cut or not dims:
                dims.append(p)
            else:
                dims[-1] *= p
        dims.insert(draw(st.integers(0, len(dims))), 1)
        return tuple(dims) if draw(st.booleans()) or math.prod(dims) != 1 else ()

    return merged(), merged()


@pytest.mark.slow
@settings(max_examples=60)
@given(reshapes())
@example(((8, 4), (4, 8)))
@example(((2, 6, 4), (12, 2, 2)))
@example(((6, 4), (6, 1, 2, 2)))
@example(((1, 1), ()))
def test_pieces_reshape_to_pieces(shapes: tuple[Shape, Shape]) -> None:
    source, target = shapes
    op, types = reshape(source, target), (TensorType(source, "f32"),)
    rule, known = rule_for(op, types)
    assert known
    whole = np.arange(math.prod(source)).reshape(source)
    sizes = MESH.sizes
    for s in strategies(rule, types, (op.results[0].type,), MESH):
        for index in itertools.product(*(range(n) for n in sizes.values())):
            where = dict(zip(sizes, index, strict=True))
            (before,), (after,) = s.operand_layouts, s.result_layouts
            got = piece(whole, before, where, sizes).reshape(after.local_shape(target, sizes))
            np.testing.assert_array_equal(got, piece(whole.reshape(target), after, where, sizes))


@given(reshapes())
def test_groups_are_runs_of_equal_products(shapes: tuple[Shape, Shape]) -> None:
    source, target = shapes
    found = groups(source, target)
    for before, after in found:
        assert math.prod(source[d] for d in before) == math.prod(target[d] for d in after)
    for shape, side in ((source, 0), (target, 1)):
        covered = [d for pair in found for d in pair[side]]
        assert covered == [d for d, n in enumerate(shape) if n != 1]


def test_heads_are_split_off_and_joined() -> None:
    """(batch, seq, hidden) <-> (batch, seq, heads, width): batch, seq and heads can be split."""
    rule, _ = rule_for(reshape((8, 16, 48), (8, 16, 6, 8)), (TensorType((8, 16, 48), "f32"),))
    assert rule.operands == ((0, 1, 2),)
    assert rule.results == ((0, 1, 2, None),)
    assert [f.size for f in rule.factors] == [8, 16, 6]
    assert rule.linear == ((0,),)


def test_permuting_and_empty_reshapes_stay_whole() -> None:
    op = Operator(
        "reshape.0",
        "reshape",
        ("a",),
        (Value("b", TensorType((8,), "f32")),),
        (("dimensions", (1, 0)), ("new_sizes", (8,))),
    )
    assert rule_for(op, (TensorType((2, 4), "f32"),))[0].factors == ()
    assert rule_for(reshape((0, 4), (4, 0)), (TensorType((0, 4), "f32"),))[0].factors == ()
