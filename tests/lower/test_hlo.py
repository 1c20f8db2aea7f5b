"""Collectives read from HLO text: forms that CPU programs do not have, written as other compilers write them."""

from __future__ import annotations

import pytest

from autopar.lower.hlo import collectives
from benchmarks.experts.compare import total_wire_bytes


def module(body: str, before: str = "", header: str = "num_partitions=8") -> str:
    return f"HloModule jit_step, is_scheduled=true, {header}\n\n{before}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def one(line: str, header: str = "num_partitions=8"):
    body = f'  %a = f32[16,32]{{1,0}} parameter(0), metadata={{op_name="x calls=%f all-reduce(%b)"}}\n{line}'
    (found,) = collectives(module(body, header=header))
    return found


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("{{0, 4}, {1, 5}, {2, 6}, {3, 7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("{{0,1},{2,3,4}}", ((0, 1), (2, 3, 4))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups(groups, want):
    found = one(f"  ROOT %r = f32[16,32]{{1,0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert found.groups == want
    assert found.group_size == max(map(len, want))
    assert (found.kind, found.dtype, found.full_bytes, found.operand_bytes) == ("all-reduce", "f32", 2048, 2048)


def test_without_groups_all_devices_are_one():
    assert one("  ROOT %r = f32[16,32] all-reduce(%a), to_apply=%add").group_size == 8
    assert one("  ROOT %r = f32[16,32] all-reduce(%a)", "replica_count=2, num_partitions=3").group_size == 6
    assert one("  ROOT %r = f32[16,32] all-reduce(%a)", "entry=1").group_size == 1


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match="the groups of r are written in a form"):
        one("  ROOT %r = f32[16,32] all-reduce(%a), replica_groups=other['x'=2]{'x'}, to_apply=%add")


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("%r = f32[16,32] all-reduce(%a), replica_groups=[2,4]<=[8]", ("all-reduce", 2048, 2 * 3 / 4 * 2048)),
        ("%r = f32[4,32] reduce-scatter(%a), replica_groups=[2,4]<=[8]", ("reduce-scatter", 2048, 3 / 4 * 2048)),
        ("%r = f32[64,32] all-gather(%a), replica_groups=[2,4]<=[8]", ("all-gather", 8192, 3 / 4 * 8192)),
        ("%r = f32[16,32] all-to-all(%a), replica_groups=[2,4]<=[8]", ("all-to-all", 8192, 3 / 16 * 8192)),
        ("%r = f32[16,32] collective-permute(%a), source_target_pairs={{0,1}}", ("collective-permute", 2048, 2048)),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bytes(line, want, asynchronous):
    if asynchronous:
        kind = want[0]
        shape, _, rest = line.removeprefix("%r = ").partition(" ")
        start = rest.replace(f"{kind}(", f"{kind}-start(")
        line = f"%s = (f32[16,32], {shape}, u32[], u32[]) {start}\n  ROOT %r = {shape} {kind}-done(%s)"
    found = one(f"  {line}")
    assert (found.kind, found.full_bytes, found.wire_bytes) == want
    assert (found.times, found.exact) == (1, True)


def test_operands_with_their_shapes_and_tiled_layouts():
    line = "  ROOT %r = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(bf16[8,128]{1,0:T(8,128)(2,1)} %x), channel_id=3"
    found = one(line)
    assert (found.dtype, found.full_bytes) == ("bf16", 2048)


def test_pairs_of_a_permutation():
    found = one("  ROOT %r = f32[16,32] collective-permute(%a), source_target_pairs={{0,1},{1,2},{2,0}}")
    assert found.groups == ((0, 1), (1, 2), (2, 0))
    assert found.group_size == 2


def test_a_permutation_into_a_buffer_sends_its_operand():
    body = """  %a = f32[16,32] parameter(0)
  %b = f32[64,32] parameter(1)
  %i = (s32[], s32[]) parameter(2)
  %j = (s32[], s32[]) parameter(3)
  ROOT %r = f32[64,32] collective-permute(%a, %b, %i, %j), source_target_pairs={{0,1}}, slice_sizes={{16,32}}"""
    (found,) = collectives(module(body))
    assert found.full_bytes == 2048


def test_several_operands_are_several_collectives():
    body = """  %a = f32[16] parameter(0)
  %b = s32[8] parameter(1)
  %p = pred[3] parameter(2)
  ROOT %r = (f32[16], s32[8], pred[3]) all-reduce(%a, /*index=1*/%b, %p), replica_groups={{0,1}}, to_apply=%add"""
    found = collectives(module(body))
    assert [(c.kind, c.dtype, c.full_bytes, c.name) for c in found] == [
        ("all-reduce", "f32", 64, "r"),
        ("all-reduce", "i32", 32, "r"),
        ("all-reduce", "bool", 3, "r"),
    ]
    assert total_wire_bytes(found) == 99


def test_combined_gathers_that_start_together():
    body = """  %a = bf16[16] parameter(0)
  %b = bf16[8] parameter(1)
  %s = ((bf16[16], bf16[8]), (bf16[64], bf16[32])) all-gather-start(%a, %b), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %r = (bf16[64], bf16[32]) all-gather-done(%s)"""
    assert [(c.full_bytes, c.group_size) for c in collectives(module(body))] == [(128, 4), (64, 4)]


def test_the_tuple_form_of_all_to_all_is_one_collective():
    body = """  %a = f32[2,4] parameter(0)
  %b = f32[2,4] parameter(1)
  ROOT %r = (f32[2,4], f32[2,4]) all-to-all(%a, %b), replica_groups={{0,1},{2,3}}"""
    (found,) = collectives(module(body))
    assert (found.operand_bytes, found.full_bytes, found.wire_bytes) == (64, 128, 32)


def test_ragged_all_to_all_counts_its_data():
    body = """  %a = f32[16,4] parameter(0)
  %o = f32[32,4] parameter(1)
  %n = s32[4] parameter(2)
  ROOT %r = f32[32,4] ragged-all-to-all(%a, %o, %n, %n, %n, %n), replica_groups={{0,1,2,3}}"""
    (found,) = collectives(module(body))
    assert (found.kind, found.full_bytes) == ("all-to-all", 1024)


ASYNC = """%wrapped (p: f32[16]) -> f32[4] {
  %p = f32[16] parameter(0)
  ROOT %rs = f32[4] reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}"""


@pytest.mark.parametrize("repeated", ["", ", calls=%wrapped"])
@pytest.mark.parametrize("start", ["async-start(%a)", "reduce-scatter-start(%a), replica_groups={{0,1,2,3}}"])
def test_wrapped_asynchronous_collectives_count_once(start, repeated):
    body = f"""  %a = f32[16] parameter(0)
  %s = ((f32[16]), f32[4], u32[]) {start}, calls=%wrapped
  %u = ((f32[16]), f32[4], u32[]) async-update(%s){repeated}
  ROOT %r = f32[4] async-done(%u){repeated}"""
    (found,) = collectives(module(body, ASYNC))
    assert (found.kind, found.full_bytes, found.times) == ("reduce-scatter", 64, 1)


LOOPS = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%fused (p: f32[16]) -> f32[16] {
  %p = f32[16] parameter(0)
  ROOT %in_fusion = f32[16] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%inner (p.1: f32[16]) -> f32[16] {
  %p.1 = f32[16] parameter(0)
  ROOT %f = f32[16] fusion(%p.1), kind=kCustom, calls=%fused
}

%cond (p.2: f32[16]) -> pred[] {
  %p.2 = f32[16] parameter(0)
  %in_condition = f32[16] all-reduce(%p.2), replica_groups={{0,1}}, to_apply=%add
  ROOT %c = pred[] custom-call(%in_condition), custom_call_target="check"
}

%outer (p.3: f32[16]) -> f32[16] {
  %p.3 = f32[16] parameter(0)
  %w = f32[16] while(%p.3), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %k = f32[16] call(%w), to_apply=%fused
}

%never (p.4: f32[16]) -> f32[16] {
  %p.4 = f32[16] parameter(0)
  ROOT %unused = f32[16] all-reduce(%p.4), replica_groups={{0,1}}, to_apply=%add
}

%yes (p.5: f32[16]) -> f32[16] {
  %p.5 = f32[16] parameter(0)
  ROOT %in_branch = f32[16] all-reduce(%p.5), replica_groups={{0,1}}, to_apply=%add
}

%no (p.6: f32[16]) -> f32[16] {
  ROOT %p.6 = f32[16] parameter(0)
}
"""


def times(body: str, **options: float) -> dict[str, tuple[float, bool]]:
    return {c.name: (c.times, c.exact) for c in collectives(module(body, LOOPS), **options)}


def test_loops_and_calls_multiply():
    config = r'"{\"known_trip_count\":{\"n\":\"5\"}}"'
    body = f"""  %a = f32[16] parameter(0)
  ROOT %w = f32[16] while(%a), condition=%cond, body=%outer, backend_config={config}"""
    assert times(body) == {"in_fusion": (5 * 3 + 5, True), "in_condition": (5 * (3 + 1) + 5 + 1, True)}


def test_loops_of_unknown_trips_are_marked():
    body = """  %a = f32[16] parameter(0)
  ROOT %w = f32[16] while(%a), condition=%cond, body=%inner"""
    assert times(body) == {"in_fusion": (1, False), "in_condition": (2, False)}
    assert times(body, unknown_trips=10) == {"in_fusion": (10, False), "in_condition": (11, False)}


COUNTED = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%test (t: (f32[16], s32[])) -> pred[] {
  %limit = s32[] constant(6)
  %t = (f32[16], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%t), index=1
  ROOT %lt = pred[] compare(%n, %limit), direction=LT
}

%trip (u: (f32[16], s32[])) -> (f32[16], s32[]) {
  %u = (f32[16], s32[]) parameter(0)
  %v = f32[16] get-tuple-element(%u), index=0
  %in_loop = f32[16] all-reduce(%v), replica_groups={{0,1}}, to_apply=%add
  %m = s32[] get-tuple-element(%u), index=1
  %copied = s32[] copy(%m)
  %step = s32[] constant(STEP)
  %next = s32[] add(%copied, %step)
  ROOT %out = (f32[16], s32[]) tuple(%in_loop, %next)
}
"""


@pytest.mark.parametrize(("start", "step", "trips"), [(0, 1, (6, True)), (2, 1, (1, False)), (0, 2, (1, False))])
def test_trips_that_the_text_does_not_say_are_read_off_the_counter(start: int, step: int, trips: tuple[float, bool]):
    """TPU programs have loops of which only the condition tells the trips."""
    body = f"""  %a = f32[16] parameter(0)
  %first = s32[] constant({start})
  %given = s32[] copy(%first)
  %both = (f32[16], s32[]) tuple(%a, %given)
  %w = (f32[16], s32[]) while(%both), condition=%test, body=%trip
  ROOT %r = f32[16] get-tuple-element(%w), index=0"""
    (found,) = collectives(module(body, COUNTED.replace("STEP", str(step))))
    assert (found.times, found.exact) == trips


@pytest.mark.parametrize(
    "branches", ["branch_computations={%yes, %no}", "true_computation=%yes, false_computation=%no"]
)
def test_branches_share_a_run(branches):
    body = f"""  %a = f32[16] parameter(0)
  %c = pred[] constant(true)
  ROOT %r = f32[16] conditional(%c, %a, %a), {branches}"""
    assert times(body) == {"in_branch": (0.5, False)}


def test_what_no_one_calls_does_not_count():
    assert times("  ROOT %a = f32[16] parameter(0)") == {}


@pytest.mark.parametrize(
    ("written", "dtype", "size"),
    [
        ("pred", "bool", 8), ("s32", "i32", 32), ("u8", "u8", 8), ("s4", "i4", 4), ("c64", "c64", 64),
        ("f8e4m3fn", "f8_e4m3fn", 8), ("f4e2m1fn", "f4_e2m1fn", 4), ("bf16", "bf16", 16), ("f64", "f64", 64),
    ],
)  # fmt: skip
def test_dtypes(written, dtype, size):
    body = f"  %a = {written}[8] parameter(0)\n  ROOT %r = {written}[8] all-reduce(%a), replica_groups={{{{0,1}}}}"
    (found,) = collectives(module(body))
    assert (found.dtype, found.full_bytes) == (dtype, size)


@pytest.mark.parametrize("text", ["", "not a program", "module @jit_f {\n  func.func @main() {\n  }\n}\n"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives(text)


def test_a_collective_that_is_run_bit_by_bit_in_several_fusions_counts_once():
    def fusion(name: str, chain: int, layout: str) -> str:
        attributes = f'replica_groups=[2,4]<=[8], dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}'
        return f"%{name} (p: f32[16]) -> f32[64] {{\n  %p = f32[16] parameter(0)\n" + (
            f"  ROOT %g.{name} = f32[64]{layout} all-gather(%p), {attributes}\n}}\n"
        )

    before = fusion("start", 0, "{0}") + fusion("middle", 0, "{0:T(128)S(1)}") + fusion("other", 1, "{0}")
    body = "  %a = f32[16] parameter(0)\n" + "\n".join(
        f"  %r.{n} = f32[64] fusion(%a), kind=kCustom, calls=%{n}" for n in ("start", "middle", "other")
    )
    found = collectives(module(body, before))
    assert [(c.kind, c.full_bytes, c.times) for c in found] == [("all-gather", 256, 1.0)] * 2
