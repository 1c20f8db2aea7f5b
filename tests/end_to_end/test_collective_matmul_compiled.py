"""Products in blocks in programs that the compilers of TPUs and GPUs make; both compilers may be absent."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from autopar.lower.aot import parse_target
from benchmarks.collective_matmul import compiled, products_between


def test_products_between_are_counted() -> None:
    hlo = """ENTRY %main () -> f32[] {
  %a = f32[8]{0} parameter(0)
  %s = (f32[8], f32[8]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %p = f32[8]{0} fusion(%a), kind=kOutput, metadata={op_name="dot_general"}
  %d = f32[8]{0} collective-permute-done(%s)
  %t = (f32[8], f32[8]) collective-permute-start(%d), source_target_pairs={{0,1}}
  ROOT %e = f32[8]{0} collective-permute-done(%t)
}"""
    assert products_between(hlo) == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "cuda:h100:1x8"])
def test_messages_run_next_to_products(target: str) -> None:
    """Each of 14 messages has a product between its start and its end, and the step is shorter."""
    if any(find_spec(name.partition(".")[0]) is None for name in parse_target(target).needs):
        pytest.skip(f"there is no compiler for {target}")
    plain, in_blocks = compiled(target, "none"), compiled(target, "auto")
    assert in_blocks.compiled_step_s.total_s < plain.compiled_step_s.total_s
    counts = products_between(in_blocks.hlo)
    assert len(counts) == 14 and min(counts) >= 1
    assert in_blocks.compiled_step_s.exposed_s < 0.6 * plain.compiled_step_s.exposed_s
