"""Seconds of slices of tokens, as shares of a whole microbatch, and the lengths that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost import CostModel, operator_flops
from autopar.microbatch.tokens import analyze_tokens
from autopar.schedule.slices import pass_seconds, slice_lengths
from autopar.search import token_slices
from autopar.search.token_slices import SliceShares
from examples import gpt
from tests.microbatch.running import traced

TOKENS = 4096


@pytest.fixture(scope="module")
def shares() -> SliceShares:
    step, args = gpt.build("1.3B", abstract=True, layers=1, seq=TOKENS, batch=1, vocab=1024, dtype="bfloat16")
    graph = traced(step, args)[0].graph
    return SliceShares(CostModel(Cluster.load("dgx-a100")), graph, analyze_tokens(graph), 1, 1)


def test_slices_share_the_work_of_a_whole(shares: SliceShares) -> None:
    assert shares.of(TOKENS, 0) == 1
    halves = [shares.of(TOKENS // 2, before) for before in (0, TOKENS // 2)]
    assert halves[0] < halves[1], "later tokens have more keys"
    # A causal slice leaves out keys behind it, so that slices together do less than the whole, until they are short.
    assert 0.5 < sum(halves) < 1.05
    short = sum(shares.of(TOKENS // 64, k * (TOKENS // 64)) for k in range(64))
    assert short > 2 * sum(halves), "short slices fill a device badly"


def test_operators_without_keys_are_priced_once_a_length(shares: SliceShares, monkeypatch: pytest.MonkeyPatch) -> None:
    priced = []
    monkeypatch.setattr(
        token_slices, "operator_flops", lambda op, types: priced.append(op.primitive) or operator_flops(op, types)
    )
    fresh = replace(shares)
    assert fresh._seconds(96, 0) == shares._seconds(96, 0)
    all_kinds = len(priced)
    fresh._seconds(96, 96)
    assert 0 < len(priced) - all_kinds < all_kinds / 2, "scores have keys of earlier slices, products with weights none"


def test_the_dynamic_program_with_these_prices(shares: SliceShares) -> None:
    def seconds(length: int, before: int) -> float:
        return shares.of(length, before)

    found = slice_lengths(TOKENS, 8, seconds, unit=TOKENS // 16, tolerance_s=1e-3)
    even = [pass_seconds((TOKENS // n,) * n, 8, seconds) for n in (1, 2, 4, 8, 16)]
    assert found.seconds <= min(even) + 8e-3
    assert found.seconds < 0.6 * even[0]
    several = slice_lengths(TOKENS, 1 + 7 / 16, seconds, unit=TOKENS // 16, tolerance_s=1e-3)
    assert len(several.lengths) < len(found.lengths), "with 16 microbatches the bubble is small already"
