"""`strategies`: order, evenness, partial results, and the work that is shared."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.mesh import Link, LogicalMesh
from autopar.ir import Layout, TensorType
from autopar.sharding import Assignment, Factor, Rule, Strategy, strategies


def mesh(*sizes: int) -> LogicalMesh:
    return LogicalMesh(tuple(zip("xyz", sizes, strict=False)), tuple(Link(1e9, 1e-6) for _ in sizes))


def f32(*shape: int) -> TensorType:
    return TensorType(shape, "f32")


MATMUL = Rule(
    factors=(Factor(8), Factor(8), Factor(8, reduce="sum")),
    operands=((0, 2), (2, 1)),
    results=((0, 1),),
    linear=((0,), (1,)),
)


def texts(found: tuple[Strategy, ...]) -> list[str]:
    return [" ".join(map(str, (*s.operand_layouts, *s.result_layouts))) for s in found]


def test_matmul_on_one_axis() -> None:
    found = strategies(MATMUL, (f32(8, 8), f32(8, 8)), (f32(8, 8),), mesh(4))
    assert texts(found) == [
        "[.,.] [.,.] [.,.]",
        "[x,.] [.,.] [x,.]",
        "[.,.] [.,x] [.,x]",
        "[.,x] [x,.] [.,.]+sum(x)",
        "[.,.]+sum(x) [.,.] [.,.]+sum(x)",
        "[.,.] [.,.]+sum(x) [.,.]+sum(x)",
    ]
    assert [s.split for s in found] == [1, 4, 4, 4, 1, 1]
    assert found[3].assignments == (Assignment("x", factor=2),)


def test_axes_of_size_1_are_not_assigned() -> None:
    one = strategies(MATMUL, (f32(8, 8), f32(8, 8)), (f32(8, 8),), mesh(1, 1))
    assert texts(one) == ["[.,.] [.,.] [.,.]"]
    assert one[0].assignments == ()


def test_two_axes_on_one_dim_are_mesh_major_first() -> None:
    rule = Rule((Factor(8),), ((0,),), ((0,),))
    assert "[x+y] [x+y]" in texts(strategies(rule, (f32(8),), (f32(8),), mesh(2, 4)))
    # 4 pieces of a dim of 8 are even, 8 pieces of a dim of 4 are not.
    assert "[x+y] [x+y]" not in texts(strategies(rule, (f32(4),), (f32(4),), mesh(2, 4)))


def test_every_labelled_dim_must_divide() -> None:
    rule = Rule((Factor(24),), ((0,),), ((0,),))
    assert len(strategies(rule, (f32(24),), (f32(6),), mesh(4))) == 1
    assert len(strategies(rule, (f32(24),), (f32(4),), mesh(4))) == 2
    assert len(strategies(Rule((Factor(2),), ((0,),), ((0,),)), (f32(24),), (f32(24),), mesh(4))) == 1


def test_dims_of_size_0_are_not_split() -> None:
    assert len(strategies(Rule((Factor(0),), ((0,),), ((0,),)), (f32(0),), (f32(0),), mesh(4))) == 1


def test_kinds_of_partial_results_do_not_mix() -> None:
    rule = Rule((Factor(8, "max"), Factor(8, "sum")), ((0, 1),), ((),))
    found = texts(strategies(rule, (f32(8, 8),), (f32(),), mesh(2, 2)))
    assert "[x+y,.] []+max(x,y)" in found
    assert not any("max" in t and "sum" in t for t in found)
    assert not any("[x,y]" in t or "[y,x]" in t for t in found)


def test_partial_operands_of_a_factor() -> None:
    """As in a scatter-add: where updates are split, the array added to is a partial sum."""
    rule = Rule((Factor(8, "sum", partial_operands=(0,)),), ((None,), (0,)), ((None,),))
    found = texts(strategies(rule, (f32(5), f32(8)), (f32(5),), mesh(2)))
    assert found[1] == "[.]+sum(x) [x] [.]+sum(x)"


def test_strategies_are_cached_by_value() -> None:
    types = (f32(8, 8), f32(8, 8))
    first = strategies(MATMUL, types, (f32(8, 8),), mesh(2, 4))
    other_links = LogicalMesh((("x", 2), ("y", 4)), (Link(1.0, 0.0), Link(2.0, 0.0)))
    assert strategies(MATMUL, types, (f32(8, 8),), other_links) is first


def test_rules_check_their_labels() -> None:
    with pytest.raises(ValueError, match="two dims"):
        Rule((Factor(8),), ((0, 0),), ())
    with pytest.raises(ValueError, match="no such factor"):
        Rule((Factor(8),), ((1,),), ())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rule, tuple[TensorType, ...], tuple[TensorType, ...], LogicalMesh]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), min_size=0, max_size=4))
    kinds = draw(st.lists(st.sampled_from([None, None, "sum", "max"]), min_size=len(sizes), max_size=len(sizes)))
    factors = tuple(Factor(n, k) for n, k in zip(sizes, kinds, strict=True))
    subset = st.permutations(range(len(sizes))).flatmap(
        lambda p: st.integers(0, len(sizes)).map(lambda n: tuple(p[:n]))
    )
    operands = tuple(draw(st.lists(subset, min_size=1, max_size=3)))
    result = tuple(i for i, k in enumerate(kinds) if k is None)
    groups = tuple(draw(st.lists(st.sampled_from([(i,) for i in range(len(operands))]), max_size=2, unique=True)))
    rule = Rule(factors, operands, (result,), groups)
    type = tuple(TensorType(tuple(sizes[f] for f in o), "f32") for o in operands)
    axes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    return rule, type, (TensorType(tuple(sizes[f] for f in result), "f32"),), mesh(*axes)


@given(cases())
def test_every_strategy_is_sound(
    case: tuple[Rule, tuple[TensorType, ...], tuple[TensorType, ...], LogicalMesh],
) -> None:
    rule, operand_types, result_types, where = case
    found = strategies(rule, operand_types, result_types, where)
    assert len(set(found)) == len(found)
    assert all(layout.is_replicated for layout in (*found[0].operand_layouts, *found[0].result_layouts))
    names = [name for name, n in where.axes if n > 1]
    for s in found:
        assert [a.axis for a in s.assignments] == names
        assert s.split == math.prod(where.sizes[a.axis] for a in s.assignments if a.factor is not None)
        tensors: list[tuple[Layout, TensorType]] = [
            *zip(s.operand_layouts, operand_types, strict=True),
            *zip(s.result_layouts, result_types, strict=True),
        ]
        for layout, type in tensors:
            assert layout.fits(type.shape, where.sizes)
            assert max(Counter((*layout.axes, *layout.partial)).values(), default=1) == 1
            assert list(layout.partial) == [n for n in names if n in layout.partial]
            assert layout.partial or layout.reduce == "sum"
        # An axis leaves the results partial exactly where it reduces, or where its operands are partial.
        reducing = {
            a.axis
            for a in s.assignments
            if a.group is not None or (a.factor is not None and rule.factors[a.factor].reduce)
        }
        assert set(s.result_layouts[0].partial) == reducing
        for i, layout in enumerate(s.operand_layouts):
            over = {a.axis for a in s.assignments if a.group is not None and i in rule.linear[a.group]}
            assert set(layout.partial) == over
