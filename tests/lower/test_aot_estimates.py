"""Seconds of compiled programs by group, of short texts as the compilers write them, against sums by hand."""

from __future__ import annotations

import pytest

from autopar.lower.aot.estimates import Rates, StepSeconds, estimated
from autopar.lower.hlo import collectives

#: Collectives of 1 s a kilobyte; 1 GFLOP/s and 1 kB/s; cycles of a clock of 1 kHz.
RATES = Rates(
    1e3, lambda flops, bytes, dtype: max(flops / 1e9, bytes / 1e3), lambda sent, full_bytes: full_bytes / 1024
)
GROUPS = "channel_id=1, replica_groups={{0,1}}"


def cycles(n: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{n}"}}}}'


def module(body: str, before: str = "") -> str:
    header = "HloModule jit_step, is_scheduled=true, num_partitions=2"
    return f"{header}\n\n{before}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


PRODUCT = """%fused_product (p: f32[16,16]) -> f32[16,16] {
  %p = f32[16,16]{1,0} parameter(0)
  ROOT %d = f32[16,16]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_sum (q: f32[16,16]) -> f32[16,16] {
  %q = f32[16,16]{1,0} parameter(0)
  ROOT %s = f32[16,16]{1,0} add(%q, %q)
}
"""


def test_kernels_by_what_is_fused_into_them() -> None:
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        f"  %b = f32[16,16]{{1,0}} fusion(%a), kind=kOutput, calls=%fused_product, {cycles(3000)}\n"
        f"  %c = f32[16,16]{{1,0}} fusion(%b), kind=kLoop, calls=%fused_sum, {cycles(2000)}\n"
        f"  ROOT %r = f32[16,16]{{1,0}} copy(%c), {cycles(500)}"
    )
    found = estimated(module(body, PRODUCT), RATES)
    assert found == StepSeconds(3.0, 2.5, 0.0, 0.0, said=1.0)
    assert found.total_s == 5.5


@pytest.mark.parametrize(("kernel", "hidden"), [(600, 0.6), (4000, 1.0)])
def test_a_collective_in_two_instructions_runs_beside_what_stands_between(kernel: int, hidden: float) -> None:
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        f"  %s = (f32[16,16], f32[16,16]) all-reduce-start(%a), {GROUPS}, to_apply=%add\n"
        f"  %b = f32[16,16]{{1,0}} fusion(%a), kind=kLoop, calls=%fused_sum, {cycles(kernel)}\n"
        "  %d = f32[16,16]{1,0} all-reduce-done(%s)\n"
        f"  ROOT %r = f32[16,16]{{1,0}} all-reduce(%d), {GROUPS}, to_apply=%add"
    )
    found = estimated(module(body, PRODUCT), RATES)
    # 1 kB each: 1 s, of the first of which the kernel hides a part; the second stops the device.
    assert found.collectives_s == 2.0
    assert found.exposed_s == pytest.approx(2.0 - hidden)
    assert found.asynchronous_s == 1.0


def test_links_carry_one_collective_at_a_time() -> None:
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        f"  %s = (f32[16,16], f32[16,16]) all-reduce-start(%a), {GROUPS}, to_apply=%add\n"
        f"  %t = (f32[16,16], f32[16,16]) all-reduce-start(%a), {GROUPS}, to_apply=%add\n"
        f"  %b = f32[16,16]{{1,0}} fusion(%a), kind=kLoop, calls=%fused_sum, {cycles(500)}\n"
        "  %d = f32[16,16]{1,0} all-reduce-done(%s)\n"
        "  ROOT %e = f32[16,16]{1,0} all-reduce-done(%t)"
    )
    assert estimated(module(body, PRODUCT), RATES).exposed_s == pytest.approx(1.5)


def test_loops_run_as_often_as_they_say() -> None:
    loop = f"""%body (t: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {{
  %t = (s32[], f32[16,16]) parameter(0)
  %x = f32[16,16]{{1,0}} get-tuple-element(%t), index=1
  %y = f32[16,16]{{1,0}} fusion(%x), kind=kOutput, calls=%fused_product, {cycles(1000)}
  ROOT %n = (s32[], f32[16,16]) tuple(%t, %y)
}}

%condition (t: (s32[], f32[16,16])) -> pred[] {{
  %t = (s32[], f32[16,16]) parameter(0)
  ROOT %c = pred[] constant(true)
}}
"""
    body = (
        "  %i = (s32[], f32[16,16]) parameter(0)\n"
        "  ROOT %w = (s32[], f32[16,16]) while(%i), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert estimated(module(body, PRODUCT + loop), RATES).products_s == 7.0


def test_parts_of_a_collective_that_are_fused_into_kernels_are_one() -> None:
    part = f"""%fused_part (p: f32[8,16]) -> f32[16,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  ROOT %g = f32[16,16]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="4"}}
}}

%fused_last (p: f32[8,16]) -> f32[16,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %g = f32[16,16]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="4"}}
  ROOT %e = f32[16,16]{{1,0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
"""
    body = (
        "  %a = f32[8,16]{1,0} parameter(0)\n"
        f"  %b = f32[16,16]{{1,0}} fusion(%a), kind=kLoop, calls=%fused_part, {cycles(300)}\n"
        f"  ROOT %c = f32[16,16]{{1,0}} fusion(%a), kind=kLoop, calls=%fused_last, {cycles(300)}"
    )
    found = estimated(module(body, part), RATES)
    assert (found.collectives_s, found.exposed_s) == (1.0, pytest.approx(0.4))


def test_what_the_compiler_for_gpus_says_of_products_and_of_others() -> None:
    product = (
        '[{"exec_time_us":500.0,"compute_time_us":499.0,"memory_access_time_us":9.0,"name":""},'
        '{"exec_time_us":510.0,"compute_time_us":27.0,"memory_access_time_us":16.0,'
        '"name":"experimental-gemm-cost-model"}]'
    )
    other = '[{"exec_time_us":15.0,"compute_time_us":0.7,"memory_access_time_us":14.9,"name":""}]'
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        "  %b = f32[16,16]{1,0} fusion(%a), kind=kCustom, calls=%fused_product, "
        f'backend_config={{"reification_cost":{product}}}\n'
        "  ROOT %c = f32[16,16]{1,0} fusion(%b), kind=kLoop, calls=%fused_sum, "
        f'backend_config={{"reification_cost":{other}}}'
    )
    found = estimated(module(body, PRODUCT), Rates(None, RATES.roofline_s, RATES.collective_s))
    assert (found.products_s, found.memory_s, found.said) == pytest.approx((27e-6, 15e-6, 1.0))


def test_without_a_word_of_the_compiler_the_text_is_counted() -> None:
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        "  %b = f32[16,16]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        '  %c = f32[16,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}\n'
        "  ROOT %r = f32[16,16]{1,0} add(%b, %c)"
    )
    slow = Rates(None, lambda flops, bytes, dtype: flops if flops else bytes, RATES.collective_s)
    assert estimated(module(body), slow) == StepSeconds(2 * 2.0 * 16**3, 3 * 1024.0, 0.0, 0.0)


def test_a_reduce_scatter_that_is_written_as_an_all_reduce_and_a_slice_is_one() -> None:
    part = f"""%all-reduce-scatter.1 (p: f32[16,16]) -> f32[8,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %g = f32[16,16]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add
  ROOT %s = f32[8,16]{{1,0}} slice(%g), slice={{[0:8], [0:16]}}
}}
"""
    body = (
        "  %a = f32[16,16]{1,0} parameter(0)\n"
        "  ROOT %c = f32[8,16]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1"
    )
    (found,) = collectives(module(body, part))
    assert (found.kind, found.full_bytes) == ("reduce-scatter", 1024)
    assert estimated(module(body, part), RATES) == StepSeconds(0.0, 0.0, 1.0, 1.0)
