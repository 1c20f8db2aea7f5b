"""What differs between two plans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import Layout
from autopar.plan import Plan
from autopar.plan.text import typed
from autopar.report.diff import diff, with_sizes
from tests.report.plans import make_plan


def test_equal_plans_do_not_differ() -> None:
    found = diff(make_plan(), make_plan())
    assert found.identical
    assert (found.facts, found.inputs) == ((), ())
    assert not any(f.differs for f in found.figures)


def test_layouts_are_compared_with_the_sizes_of_their_axes() -> None:
    found = diff(make_plan(axes=(("x", 2), ("y", 4))), make_plan(axes=(("x", 8),)))
    assert [(p.before, p.after) for p in found.inputs] == [("f32[64@x=2,32]", "f32[64@x=8,32]")] * 2
    assert [(p.name, p.before, p.after) for p in found.facts] == [("meshes", "2@x x 4@y", "8@x")]
    assert not found.identical


def test_figures_and_their_change() -> None:
    found = diff(make_plan(step_time=2e-3), make_plan(step_time=3e-3, parameters=2 * 10**9))
    rows = {f.name: f.row() for f in found.figures}
    assert rows["step time"] == ("step time", "2 ms", "3 ms", "+50.0%")
    assert rows["peak memory"] == ("peak memory", "3.5 GB", "4.5 GB", "+28.6%")
    assert rows["memory: parameters"][3] == "+100.0%"
    assert rows["memory: optimizer"][3] == "-"
    assert rows["total communication"][1:] == ("700 us", "700 us", "-")
    assert "memory: gradients" not in rows  # zero in both


def test_inputs_of_one_plan_only() -> None:
    found = diff(make_plan(num_inputs=1), make_plan(num_inputs=2))
    assert [(p.name, p.before) for p in found.inputs] == [("state['w'][1]", None)]
    assert found.num_inputs == 2
    assert "(1 of 2)" in found.sections()[2].title


def test_the_other_way_round_swaps() -> None:
    a, b = make_plan(step_time=1e-3), make_plan(axes=(("x", 8),), layout="[.,x]", num_inputs=3)

    def facts(one: Plan, other: Plan, swap: bool) -> list[tuple[object, ...]]:
        found = diff(one, other)
        pairs = [(p.name, p.before, p.after) for p in (*found.facts, *found.figures, *found.inputs)]
        return [(n, y, x) if swap else (n, x, y) for n, x, y in pairs]

    assert facts(a, b, False) == facts(b, a, True)


@given(st.lists(st.tuples(st.sampled_from([8, 64]), st.sampled_from([(), ("x",), ("y", "x")])), max_size=4))
def test_sizes_are_all_that_is_added(dims: list[tuple[int, tuple[str, ...]]]) -> None:
    type_text = f"f32[{','.join(str(n) for n, _ in dims)}]"
    layout = str(Layout(tuple(axes for _, axes in dims)))
    shown = with_sizes(type_text, layout, {"x": 2, "y": 4})
    assert shown.replace("=2", "").replace("=4", "") == typed(type_text, layout)
