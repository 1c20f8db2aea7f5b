"""Drawn models with embedding tables: the same for the same seed, and tables dealt out by hand send what they must."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.many_tables import BY_HAND, DEVICES, TablesCase, dealt_bytes, drawn, measure, packed, slots_of


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


def test_packed_tables_are_the_same_model() -> None:
    """Loss of the same tables, indices and weights, as written and packed in slots with unlike bags."""
    case = TablesCase((24, 8, 16, 40, 8, 8, 16, 8, 24, 8), (1, 2, 1, 4, 1, 1, 3, 1, 1, 2), 4, 8)
    (step, args), (other, shapes), slots = case.build(), packed(case), slots_of(case)
    random = np.random.default_rng(0)
    ((p,), b), ((q,), of_slots) = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), (args, shapes))
    p = {k: random.standard_normal(v.shape).astype(v.dtype) for k, v in p.items()}
    b = {k: random.standard_normal(v.shape).astype(v.dtype) for k, v in b.items()}
    for i, rows in enumerate(case.rows):
        b[f"ids{i}"] = random.integers(0, rows, b[f"ids{i}"].shape).astype(np.int32)
    q |= {k: p[k] for k in ("b0", "b1", "p1")} | {"p0": q["p0"]}
    q["p0"][: case.width] = p["p0"][: case.width]  # of the dense features, in front of the rows
    q["tables"] = np.asarray(slots.deal.pack({f"t{i}": p[f"t{i}"] for i in range(len(case.rows))}))
    for slot, tables in enumerate(slots.tables):
        at = 0
        for k, t in enumerate(tables):
            rows = case.width + np.arange(case.width)
            q["p0"][rows + (slot * slots.most + k) * case.width] = p["p0"][rows + t * case.width]
            ids = b[f"ids{t}"] + slots.deal.places[f"t{t}"][1]
            of_slots["ids"][:, slot, at : at + case.members[t]] = ids
            at += case.members[t]
    of_slots |= {k: b[k] for k in ("dense", "y")}
    np.testing.assert_allclose(jax.jit(other)((q,), of_slots)[1], jax.jit(step)((p,), b)[1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_plans_send_no_more_than_the_best_by_hand(number: int) -> None:
    row = measure(drawn(0, number))
    assert row["bytes/best"] <= 1.0 and row["best"] in {*BY_HAND, "dealt"}
