"""Rules of products and convolutions, read off operators as a trace makes them."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir import Operator, TensorType, Value
from autopar.sharding import Factor, Rule, rule_for
from autopar.sharding.halo import Halo


def operator(primitive: str, result: TensorType, count: int, **attrs: Any) -> Operator:
    names = tuple(f"v{i}" for i in range(count))
    return Operator(f"{primitive}.0", primitive, names, (Value("r", result),), tuple(sorted(attrs.items())))


def floats(*shape: int) -> TensorType:
    return TensorType(shape, "f32")


def test_dot_general() -> None:
    op = operator("dot_general", floats(2, 3, 5), 2, dimension_numbers=(((2,), (0,)), ((0,), (2,))))
    assert rule_for(op, (floats(2, 3, 4), floats(4, 5, 2))) == (
        Rule(
            factors=(Factor(2), Factor(3), Factor(5), Factor(4, reduce="sum")),
            operands=((0, 1, 3), (3, 2, 0)),
            results=((0, 1, 2),),
            linear=((0,), (1,)),
        ),
        True,
    )


def test_free_dims_of_a_product_keep_their_order() -> None:
    op = operator("dot_general", floats(3, 5, 7, 2), 2, dimension_numbers=(((2,), (0,)), ((), ())))
    rule, known = rule_for(op, (floats(3, 5, 4), floats(4, 7, 2)))
    assert known and [f.size for f in rule.factors] == [3, 5, 7, 2, 4]
    assert (rule.operands, rule.results) == (((0, 1, 4), (4, 2, 3)), ((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("operands", "result", "linear"),
    [
        (("f32", "f32"), "bf16", ((0,), (1,))),
        (("bf16", "f32"), "f32", ((0,), (1,))),
        (("i8", "i8"), "i32", ()),
        (("i8", "i32"), "i32", ((1,),)),
        (("i32", "f32"), "f32", ((1,),)),
        (("bool", "bool"), "bool", ()),
        (("c64", "c64"), "c64", ((0,), (1,))),
    ],
)
def test_which_operands_may_be_terms_of_a_sum(operands: tuple[str, str], result: str, linear: Any) -> None:
    op = operator("dot_general", TensorType((4, 4), result), 2, dimension_numbers=(((1,), (0,)), ((), ())))
    rule, _ = rule_for(op, tuple(TensorType((4, 4), dtype) for dtype in operands))
    assert rule.linear == linear
    assert any(f.reduce == "sum" for f in rule.factors) == (result != "bool")


def ragged(text: str, operands: int = 3) -> Operator:
    return operator("ragged_dot_general", floats(8, 6), operands, ragged_dot_dimension_numbers=text)


def test_ragged_product_splits_rows_and_groups() -> None:
    text = (
        "RaggedDotDimensionNumbers(dot_dimension_numbers=(((1,), (1,)), ((), ())), "
        "lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))"
    )
    types = (floats(8, 4), floats(2, 4, 6), TensorType((2,), "i32"))
    rule, known = rule_for(ragged(text), types)
    assert known
    assert rule.factors == (Factor(2, reduce="sum"), Factor(8), Factor(6), Factor(4, reduce="sum"))
    assert rule.operands == ((1, 3), (0, 3, 2), (None,))
    assert rule.results == ((1, 2),)


@pytest.mark.parametrize("text", ["", "Other(dot_dimension_numbers=1)", "None"])
def test_ragged_product_of_another_version_is_whole(text: str) -> None:
    rule, known = rule_for(ragged(text), (floats(8, 4), floats(2, 4, 6), TensorType((2,), "i32")))
    assert not known
    assert rule.factors == ()


SPECS = {"lhs_spec": (0, 3, 1, 2), "rhs_spec": (3, 2, 0, 1), "out_spec": (0, 3, 1, 2)}


WINDOW = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
#: Windows of three elements over five, with one of padding on each side.
EDGES = Halo(size=5, count=5, step=1, extent=3, pad=1, dilation=1)


def convolution(groups: int, batch_groups: int, left: Any, kernel: Any, result: Any) -> Rule:
    op = operator(
        "conv_general_dilated",
        floats(*result),
        2,
        feature_group_count=groups,
        batch_group_count=batch_groups,
        **SPECS,
        **WINDOW,
    )
    return rule_for(op, (floats(*left), floats(*kernel)))[0]


def test_plain_convolution() -> None:
    rule = convolution(1, 1, (2, 5, 5, 4), (3, 3, 4, 8), (2, 5, 5, 8))
    assert rule.factors == (Factor(2), Factor(8), Factor(4, reduce="sum"), *[Factor(5, halo=EDGES)] * 2)
    assert rule.operands == ((0, 3, 4, 2), (None, None, 2, 1))
    assert rule.results == ((0, 3, 4, 1),)


def test_groups_of_features_are_one_factor_of_their_count() -> None:
    rule = convolution(4, 1, (2, 5, 5, 8), (3, 3, 2, 12), (2, 5, 5, 12))
    assert rule.factors == (Factor(2), Factor(4), *[Factor(5, halo=EDGES)] * 2)
    assert rule.operands == ((0, 2, 3, 1), (None, None, None, 1))
    assert rule.results == ((0, 2, 3, 1),)


def test_groups_of_the_batch_are_one_factor_of_their_count() -> None:
    rule = convolution(1, 4, (8, 5, 5, 6), (5, 5, 6, 12), (2, 3, 3, 12))
    assert rule.factors == (Factor(4), Factor(6, reduce="sum"), *[Factor(5, reduce="sum", halo=EDGES)] * 2)
    assert rule.operands == ((0, 2, 3, 1), (2, 3, 1, 0))
    assert rule.results == ((None, None, None, 0),)


def test_both_kinds_of_groups_are_whole() -> None:
    assert convolution(2, 2, (4, 5, 5, 4), (3, 3, 2, 8), (2, 5, 5, 8)).factors == ()
