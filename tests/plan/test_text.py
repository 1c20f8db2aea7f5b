from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanMismatchError
from autopar.ir import Layout, TensorType
from autopar.plan import InputRecord, Plan
from autopar.plan.text import bytes_text, seconds_text, typed
from tests.plan.plans import small_plan

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str, text: str) -> str:
    """What the golden file holds; AUTOPAR_UPDATE_GOLDEN=1 writes ``text`` to it first."""
    path = GOLDEN / name
    if os.environ.get("AUTOPAR_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def test_the_table() -> None:
    text = str(small_plan()) + "\n"
    assert text == golden("plan_small.txt", text)


def test_the_json() -> None:
    text = small_plan().to_json()
    assert text == golden("plan_small.json", text)


def test_no_line_ends_with_blanks() -> None:
    assert [line for line in str(small_plan()).split("\n") if line != line.rstrip()] == []


def test_explain_an_operator_a_member_and_a_part() -> None:
    plan = small_plan()
    text = plan.explain("dot_general.0")
    assert text.startswith("dot_general.0\n")
    assert "1.1 ms" in text
    assert "1.9 ms" in text
    assert plan.explain("tanh.0") == text
    assert plan.explain("general") == text
    assert "none" in plan.explain("batch['x']")
    assert "and 2 more" in plan.explain("exp.7")


def test_explain_without_a_name_begins_with_the_dearest() -> None:
    text = small_plan().explain()
    order = [text.index(name) for name in ("dot_general.0", "reduce_sum.0", "batch['x']")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("name", "near"),
    [("dot_genral.0", "dot_general.0"), ("batch['y']", "batch['x']"), ("reduce_sun.0", "reduce_sum.0")],
)
def test_explain_an_unknown_name_lists_near_ones(name: str, near: str) -> None:
    with pytest.raises(PlanMismatchError, match=re.escape(repr(name))) as caught:
        small_plan().explain(name)
    assert caught.value.remedy is not None
    assert near in caught.value.remedy


@pytest.mark.parametrize("name", ["", "zzzzzzzz"])
def test_explain_a_name_like_no_other(name: str) -> None:
    empty = Plan(msgspec.structs.replace(small_plan().content, choices=()))
    with pytest.raises(PlanMismatchError, match="no operator or argument"):
        empty.explain(name)
    if name:
        with pytest.raises(PlanMismatchError, match="near names: "):
            small_plan().explain(name)


@given(st.floats(1, 1e16))
def test_bytes_are_within_rounding(count: float) -> None:
    number, unit = bytes_text(count).split(" ")
    scale = 1000 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert float(number) * scale == pytest.approx(count, rel=6e-3, abs=0.5)
    assert len(number) <= 4 or count >= 999.5e15


@given(st.floats(1e-12, 1e6))
def test_seconds_are_within_rounding(seconds: float) -> None:
    number, unit = seconds_text(seconds).split(" ")
    scale = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=6e-3)


def test_texts_of_nothing() -> None:
    assert (bytes_text(0), seconds_text(0), seconds_text(None)) == ("0 B", "0 s", "-")


def typed_text(type: TensorType, layout: Layout) -> str:
    """Type and layout together: ``bf16[8@data,1024]``, each dim with the axes that split it."""
    dims = [f"{n}@{'+'.join(d)}" if d else str(n) for n, d in zip(type.shape, layout.dims, strict=True)]
    tail = f" {layout.reduce}({','.join(layout.partial)})" if layout.partial else ""
    return f"{type.dtype}[{','.join(dims)}]{tail}"


@given(
    st.lists(st.tuples(st.sampled_from([8, 16]), st.sampled_from([(), ("x",), ("y", "x")])), max_size=3),
    st.sampled_from([(), ("z",)]),
)
def test_types_with_layouts_read_as_in_the_graph(dims: list[tuple[int, tuple[str, ...]]], partial) -> None:
    type = TensorType(tuple(n for n, _ in dims), "bf16")
    layout = Layout(tuple(axes for _, axes in dims), partial)
    text = typed(str(type), str(layout))
    assert text.replace("+sum(", " sum(") == typed_text(type, layout)


def test_many_inputs_are_cut() -> None:
    inputs = tuple(InputRecord(f"w{i}", "f32[]", "parameter", "[]") for i in range(60))
    plan = Plan(msgspec.structs.replace(small_plan().content, inputs=inputs))
    assert "... 20 more" in str(plan)


def test_the_html_is_closed_and_escaped() -> None:
    inputs = (InputRecord("a<script>", "f32[]", "parameter", "[]"),)
    html = Plan(msgspec.structs.replace(small_plan().content, inputs=inputs, program="<b>"))._repr_html_()
    assert "<script>" not in html
    assert "<b>" not in html
    open_tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Parser().feed(html)
    assert open_tags == []


def test_properties() -> None:
    plan = small_plan()
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (2, 8, "1f1b")
    assert plan.stages[0].mesh_shape == {"data": 2, "model": 2}
    assert plan.stages[0].memory.total == 8_001_511
    assert [c.kind for c in plan.communication] == ["all-reduce", "all-gather"]
    assert plan.input_stages == {"state.params['w']": (0,), "state.opt_state[0].count": (0,), "batch['x']": (1,)}
    assert plan.search.gap == pytest.approx(0.1 / 2.1)
    assert repr(plan).startswith("Plan('train_step' on 'two hosts': 2 stages")


def test_input_shardings_of_a_loaded_plan_are_by_path() -> None:
    from jax.sharding import PartitionSpec

    specs = Plan.from_json(small_plan().to_json()).input_shardings
    assert specs == {
        "state.params['w']": PartitionSpec(None, "model"),
        "state.opt_state[0].count": PartitionSpec(),
        "batch['x']": PartitionSpec("data"),
    }
