"""Drawn models with embedding tables: the same for the same seed, and tables dealt out by hand send what they must."""

from __future__ import annotations

import jax
import pytest

from benchmarks.many_tables import BY_HAND, DEVICES, TablesCase, dealt_bytes, drawn, measure


def test_a_seed_draws_the_same_models() -> None:
    cases = [drawn(3, n) for n in range(30)]
    assert cases == [drawn(3, n) for n in range(30)] and cases != [drawn(4, n) for n in range(30)]
    assert {len(c.rows) for c in cases} >= {4, 26, 64}
    step, args = min(cases, key=lambda c: len(c.rows)).build()
    state, loss = jax.eval_shape(step, *args)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(args[0])]
    assert loss.shape == ()


def test_tables_that_are_dealt_out_send_indices_and_rows() -> None:
    """A device sends seven eighths of its examples' indices, of its table's rows, and of the gradients of these."""
    case = TablesCase((64,) * DEVICES, (1,) * DEVICES, 16, 64)
    others = (DEVICES - 1) / DEVICES
    rows, indices = 64 * 16 * 4, 64 * 4
    weights = {name: s.size * 4 for name, s in case.shapes[0].items() if not name.startswith("t")}
    assert dealt_bytes(case) == pytest.approx(others * (2 * rows + indices + 2 * sum(weights.values())), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_plans_send_no_more_than_the_best_by_hand(number: int) -> None:
    row = measure(drawn(0, number))
    assert row["bytes/best"] <= 1.0 and row["best"] in {*BY_HAND, "dealt"}
