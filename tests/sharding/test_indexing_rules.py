"""Rules of reads and writes at computed positions, and of windows."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir import Operator, TensorType, Value
from autopar.sharding import Factor, Rule, rule_for

INDICES = TensorType((4, 1), "i32")


def operator(primitive: str, result: TensorType, count: int, **attrs: Any) -> Operator:
    names = tuple(f"v{i}" for i in range(count))
    return Operator(f"{primitive}.0", primitive, names, (Value("r", result),), tuple(sorted(attrs.items())))


def embedding(dtype: str = "f32", mode: str = "CLIP", **more: Any) -> Rule:
    op = operator(
        "gather",
        TensorType((4, 6), dtype),
        2,
        mode=mode,
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        operand_batching_dims=(),
        start_indices_batching_dims=(),
        slice_sizes=(1, 6),
        **more,
    )
    return rule_for(op, (TensorType((16, 6), dtype), INDICES))[0]


def update(primitive: str, dtype: str = "f32", mode: str = "CLIP", indices: TensorType = INDICES, **more: Any) -> Rule:
    op = operator(
        primitive,
        TensorType((16, 6), dtype),
        3,
        mode=mode,
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        operand_batching_dims=(),
        scatter_indices_batching_dims=(),
        **more,
    )
    types = (TensorType((16, 6), dtype), indices, TensorType((indices.shape[0], 6), dtype))
    return rule_for(op, types)[0]


def test_embedding() -> None:
    rule = embedding()
    assert rule.factors == (Factor(4), Factor(6), Factor(16, reduce="sum"))
    assert rule.operands == ((2, 1), (0, None))
    assert rule.results == ((0, 1),)
    assert rule.linear == ((0,),)


@pytest.mark.parametrize(
    ("mode", "more", "linear"),
    [
        ("PROMISE_IN_BOUNDS", {"fill_value": None}, ((0,),)),
        ("FILL_OR_DROP", {"fill_value": 0}, ((0,),)),
        ("FILL_OR_DROP", {"fill_value": 0.0}, ((0,),)),
        ("FILL_OR_DROP", {"fill_value": float("nan")}, ()),
        ("FILL_OR_DROP", {"fill_value": -(2**31)}, ()),
    ],
)
def test_a_fill_that_is_not_zero_is_not_linear(mode: str, more: dict[str, Any], linear: Any) -> None:
    assert embedding(mode=mode, **more).linear == linear


def test_values_that_cannot_be_added_keep_the_vocabulary_whole() -> None:
    assert embedding("bool").operands == ((None, 1), (0, None))
    assert embedding("key<fry>").linear == ()


def test_other_modes_are_whole() -> None:
    assert embedding(mode="ONE_HOT").factors == ()
    assert update("scatter-add", mode="ONE_HOT").factors == ()


def test_added_updates_leave_partial_sums() -> None:
    rule = update("scatter-add")
    assert rule.factors == (Factor(4, reduce="sum", partial_operands=(0,)), Factor(6), Factor(16))
    assert rule.operands == ((2, 1), (0, None), (0, 1))
    assert rule.results == ((2, 1),)
    assert rule.linear == ((0, 2),)


@pytest.mark.parametrize("primitive", ["scatter", "scatter-mul", "scatter-min", "scatter-max"])
def test_other_updates_stay_together(primitive: str) -> None:
    rule = update(primitive, update_jaxpr=None, unique_indices=False)
    assert rule.factors == (Factor(6), Factor(16))
    assert rule.operands == ((1, 0), (None, None), (None, 0))
    assert rule.linear == (((0,),) if primitive == "scatter-mul" else ())


@pytest.mark.parametrize(
    ("indices", "attrs", "linear"),
    [
        (INDICES, {"update_jaxpr": None, "unique_indices": True}, ((0, 2),)),
        (INDICES, {"update_jaxpr": None, "unique_indices": False}, ()),
        (INDICES, {"unique_indices": True}, ()),  # a function of the user is no attribute
        (TensorType((1, 1), "i32"), {"update_jaxpr": None, "unique_indices": False}, ((0, 2),)),
    ],
)
def test_overwriting_is_linear_where_it_is_clear_which_update_wins(
    indices: TensorType, attrs: dict[str, Any], linear: Any
) -> None:
    assert update("scatter", indices=indices, **attrs).linear == linear


def test_an_index_without_components_is_whole() -> None:
    op = operator(
        "scatter-add",
        TensorType((8,), "f32"),
        3,
        mode="CLIP",
        update_window_dims=(0,),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(),
        operand_batching_dims=(),
        scatter_indices_batching_dims=(),
    )
    rule, known = rule_for(op, (TensorType((8,), "f32"), TensorType((2, 0), "i32"), TensorType((8, 2), "f32")))
    assert known
    assert rule.factors == ()
    assert rule.linear == ()


def test_slices() -> None:
    start = TensorType((), "i32")
    whole, part = TensorType((8, 4), "f32"), TensorType((2, 4), "f32")
    rule, _ = rule_for(operator("dynamic_slice", part, 3, slice_sizes=(2, 4)), (whole, start, start))
    assert rule == Rule((Factor(4),), ((None, 0), (), ()), ((None, 0),), ((0,),))
    rule, _ = rule_for(operator("dynamic_update_slice", whole, 4), (whole, part, start, start))
    assert rule == Rule((Factor(4),), ((None, 0), (None, 0), (), ()), ((None, 0),), ((0, 1),))


@pytest.mark.parametrize(
    ("primitive", "name", "dim"), [("top_k", "axis", 1), ("approx_top_k", "reduction_dimension", -1)]
)
def test_top_k(primitive: str, name: str, dim: int) -> None:
    results = (Value("v", TensorType((8, 3), "f32")), Value("i", TensorType((8, 3), "i32")))
    op = Operator("top.0", primitive, ("x",), results, ((name, dim),))
    rule, known = rule_for(op, (TensorType((8, 16), "f32"),))
    assert known
    assert rule == Rule((Factor(8),), ((0, None),), ((0, None), (0, None)))


def test_windows_without_padding_text_are_whole() -> None:
    op = operator(
        "reduce_window_sum",
        TensorType((8, 4), "f32"),
        1,
        window_dimensions=(1, 2),
        window_strides=(1, 1),
        padding="SAME",
    )
    rule, known = rule_for(op, (TensorType((8, 4), "f32"),))
    assert (rule.factors, known) == ((), False)
