"""Names of groups of devices, and predictions joined with what was compiled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import wire_bytes
from autopar.lower.aot.collectives import GroupNames, groups_along, pairs_along
from autopar.lower.aot.estimates import StepSeconds
from autopar.lower.aot.messages import CompiledCollective, CompiledMemory
from autopar.lower.aot.verification import Verification, join
from autopar.plan import Communication
from autopar.plan.types import Memory

AXES = (("x", 2), ("y", 4))


def test_groups_along_axes() -> None:
    assert groups_along(AXES, ("y",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_along(AXES, ("x",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_along(AXES, ("y", "x")) == ((0, 4, 1, 5, 2, 6, 3, 7),)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_are_named_by_their_axes_in_any_order(sizes: list[int], data: st.DataObject) -> None:
    axes = tuple(zip("xyz", sizes, strict=False))
    wide = [a for a, n in axes if n > 1]
    chosen = data.draw(st.permutations(wide)) if wide else []
    some = tuple(chosen[: data.draw(st.integers(0, len(chosen)))])
    names = GroupNames(axes)
    groups = tuple(tuple(reversed(g)) for g in groups_along(axes, some))
    assert sorted(d for g in groups for d in g) == list(range(sum(map(len, groups))))
    if some:
        assert names.of("all-reduce", groups) == names.ordered(some)


def test_other_groups_are_counted() -> None:
    names = GroupNames(AXES)
    assert names.of("all-reduce", ((0, 1), (2, 3), (4, 5), (6, 7))) == "4 groups of 2"
    assert names.of("collective-permute", pairs_along(AXES, ("y", "x"))) == "x+y"
    assert names.of("collective-permute", ((0, 1), (1, 0))) == "2 pairs"


def said(kind: str, size: int, axis: str, count: float) -> Communication:
    return Communication(kind, size, axis, count, 0, 0.0, ("add.1",))  # type: ignore[arg-type]


def compiled(kind: str, size: int, axis: str, count: float, n: int, instructions: int = 1) -> CompiledCollective:
    sent = count * wire_bytes(kind, size, n)
    return CompiledCollective(kind, axis, size, sent, count, instructions, True, ("f32",), ("jit(f)/shard_map/psum",))


def verification(rows) -> Verification:
    memory = CompiledMemory(60, 50, 30, 40)
    seconds = StepSeconds(6e-4, 3e-4, 2e-4, 1e-4)
    return Verification(
        "f", "c", "cpu", "cpu", AXES, rows, Memory(parameters=95), memory, 0.0, 1e-3, seconds, seconds, 3, None, 0.1
    )


def test_memory_is_no_more_than_the_peak_that_a_compiler_says() -> None:
    """In `temporaries` of TPU programs what a loop writes into is counted more than once."""
    assert CompiledMemory(60, 50, 30, 40).total == 100
    assert CompiledMemory(60, 50, 30, 40, peak=90).total == 90
    assert CompiledMemory(60, 50, 30, 40, peak=120).total == 100
    assert CompiledMemory(60, 50, 30, 40, host=20, peak=90).total == 80


def test_equal_collectives_are_joined_and_near_sizes_too() -> None:
    rows = join(
        (said("all-reduce", 1000, "y+x", 2), said("all-gather", 4000, "y", 1)),
        (compiled("all-reduce", 1010, "x+y", 2, 8), compiled("all-gather", 4000, "y", 1, 4)),
        AXES,
    )
    assert [(r.kind, r.axis, r.bytes, r.predicted, r.compiled) for r in rows] == [
        ("all-gather", "y", 4000, 1, 1),
        ("all-reduce", "x+y", 1000, 2, 2),
    ]
    found = verification(rows)
    assert found.ok and found.memory_ratio == 0.95
    assert "compiled as predicted" in str(found) and "differ" not in str(found)


def test_what_differs_comes_first_and_says_where_it_is_from() -> None:
    rows = join(
        (said("all-reduce", 1000, "x", 2), said("all-gather", 4000, "y", 3)),
        (compiled("all-reduce", 1000, "x", 2, 2), compiled("all-gather", 4000, "y", 2, 4)),
        AXES,
    )
    assert [(r.kind, r.ok) for r in rows] == [("all-gather", False), ("all-reduce", True)]
    found = verification(rows)
    assert not found.ok and not found.collectives_ok and found.memory_ok
    assert "add.1" in str(found) and "psum" in str(found)
    assert [t.kind for t in found.totals if not t.ok] == ["all-gather"]
    assert found.to_dict()["collectives"][0]["predicted"] == 3
    assert "<table>" in found._repr_html_()


def test_collectives_that_xla_joined_count_each() -> None:
    rows = join((said("all-reduce", 4, "x", 2),), (compiled("all-reduce", 4, "x", 2, 2, instructions=1),), AXES)
    assert verification(rows).collectives_ok
    assert "several in one instruction" in str(verification(rows))


def test_a_collective_along_no_axes_stands_alone() -> None:
    rows = join((), (compiled("all-reduce", 4, "4 groups of 2", 1, 2),), AXES)
    assert [(r.axis, r.predicted, r.compiled) for r in rows] == [("4 groups of 2", 0.0, 1)]


def test_what_xla_does_in_another_way_is_counted_and_said() -> None:
    rows = join(
        (
            said("reduce-scatter", 4096, "x", 3),
            said("all-gather", 4096, "y", 2),
            said("all-gather", 8192, "x", 1),
            said("all-gather", 64000, "x+y", 1),
            said("all-reduce", 4, "x", 2),
            said("all-reduce", 4, "y", 2),
        ),
        (
            compiled("all-reduce", 4096, "x", 3, 2),
            compiled("all-reduce", 2048, "y", 2, 4),
            compiled("all-gather", 4096, "x", 1, 2),
            compiled("all-gather", 64000, "x", 1, 2),
            compiled("all-gather", 32000, "y", 1, 4),
            compiled("all-reduce", 8, "x+y", 1, 8),
        ),
        AXES,
    )
    assert all(r.ok for r in rows)
    assert {(r.kind, r.axis, r.bytes): r.rewritten for r in rows} == {
        ("reduce-scatter", "x", 4096): ("3 as all-reduce",),
        ("all-gather", "y", 4096): ("2 as all-reduce, other width",),
        ("all-gather", "x", 8192): ("1 other width",),
        ("all-gather", "x+y", 64000): ("1 axis by axis",),
        ("all-reduce", "x", 4): ("2 along x+y at once, joined",),
        ("all-reduce", "y", 4): ("2 along x+y at once, joined",),
    }
    assert "rewritten by XLA" in str(verification(rows))


def test_a_collective_that_nothing_replaces_is_missing() -> None:
    rows = join((said("all-gather", 4096, "y", 2),), (compiled("all-reduce", 4000, "x", 2, 2),), AXES)
    assert not any(r.ok for r in rows) and not any(r.rewritten for r in rows)


def test_small_ones_of_several_sizes_are_concatenated() -> None:
    rows = join(
        (said("all-reduce", 4, "y", 4), said("all-reduce", 2048, "y", 18), said("all-reduce", 8192, "y", 2)),
        (
            compiled("all-reduce", 4, "y", 2, 4),
            compiled("all-reduce", 8, "y", 1, 4),
            compiled("all-reduce", 53248, "y", 1, 4),
        ),
        AXES,
    )
    assert all(r.ok for r in rows)
    assert {r.bytes: r.rewritten for r in rows} == {4: ("2 joined",), 2048: ("18 joined",), 8192: ("2 joined",)}


def test_a_lowering_that_differs_from_the_plan_is_told_from_a_compiler_that_does() -> None:
    records = (said("all-reduce", 4, "x", 2),)
    made = (compiled("all-reduce", 4, "x", 1, 2),)
    compilers = verification(join(records, made, AXES, {("all-reduce", "x", 4): 2.0}))
    ours = verification(join(records, made, AXES, {("all-reduce", "x", 4): 1.0, ("all-gather", "y", 8): 1.0}))
    assert (compilers.lowered_ok, ours.lowered_ok) == (True, False)
    assert not compilers.collectives_ok and not ours.collectives_ok
    assert [(r.kind, r.predicted, r.lowered, r.compiled) for r in ours.rows] == [
        ("all-gather", 0, 1.0, 0),
        ("all-reduce", 2, 1.0, 1),
    ]


def test_conversions_moved_before_gathers_of_many_sizes_are_told() -> None:
    # f32 gathers of 4096 and 2048 bytes, done in bf16: what became of the larger ones has the size of the smaller.
    rows = join(
        (said("all-gather", 4096, "y", 3), said("all-gather", 2048, "y", 4), said("all-gather", 4096, "x", 1)),
        (
            compiled("all-gather", 2048, "y", 3, 4),
            compiled("all-gather", 1024, "y", 4, 4),
            compiled("all-gather", 4096, "x", 1, 2),
        ),
        AXES,
    )
    assert all(r.ok for r in rows)
    assert {(r.axis, r.bytes): r.rewritten for r in rows} == {
        ("y", 4096): ("3 other width",),
        ("y", 2048): ("4 other width",),
        ("x", 4096): (),
    }
    found = verification(rows)
    assert found.explained and not found.collectives_ok
    assert "compiled as XLA rewrote them" in str(found)
    assert sum(r.compiled_wire_bytes for r in rows) == 0.75 * (3 * 2048 + 4 * 1024) + 0.5 * 4096


def test_one_of_several_is_explained_only_where_they_are_equal() -> None:
    predictions = (said("reduce-scatter", 4096, "x", 2),)
    one = (compiled("reduce-scatter", 4096, "x", 1, 2),)
    assert not verification(join(predictions, one, AXES)).explained
    rows = join(predictions, one, AXES, equal={("reduce-scatter", "x", 4096): 1.0})
    assert verification(rows).explained and rows[0].rewritten == ("1 done once for several",)
