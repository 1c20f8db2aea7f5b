"""Tables dealt out to devices: values and gradients of plain lookups, balance, and what a plan sends."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import AutoparError
from autopar.transforms import TableDeal, deal_tables
from tests.search.problems import toy

ROWS = {"user": 40, "item": 96, "place": 8, "day": 3, "word": 64, "shop": 24, "brand": 16, "age": 5, "kind": 2}
EXAMPLES, WIDTH = 16, 4

numbers = st.lists(st.integers(1, 12), min_size=1, max_size=7)
devices_of = st.sampled_from([1, 2, 3, 4, 8])


def named(rows: list[int]) -> dict[str, int]:
    return {f"t{i}": n for i, n in enumerate(rows)}


def drawn(rows: dict[str, int], members: int | None, seed: int) -> tuple[dict[str, Any], Any, Any]:
    """Tables, indices that count from the beginning or the end, and weights."""
    random = np.random.default_rng(seed)
    tables = {n: random.standard_normal((r, WIDTH)) for n, r in rows.items()}
    shape = (EXAMPLES,) if members is None else (EXAMPLES, members)
    ids = np.stack([random.integers(-r, r, shape) for r in rows.values()], 1)
    return tables, ids, random.standard_normal(ids.shape)


def plain(tables: dict[str, Any], ids: Any, weights: Any = None) -> Any:
    found = jnp.stack([table[ids[:, i]] for i, table in enumerate(tables.values())], 1)
    found = found if weights is None else found * weights[..., None]
    return found.sum(2) if ids.ndim == 3 else found


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(numbers, devices_of, st.sampled_from([None, 1, 3]), st.booleans(), st.data())
def test_rows_and_gradients_are_those_of_plain_lookups(rows, devices, members, weighted, data) -> None:
    loads = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    deal = deal_tables(named(rows), devices, None if loads is None else dict(zip(named(rows), loads, strict=True)))

    @jax.jit
    def both(tables: Any, ids: Any, weights: Any) -> Any:
        """Rows and gradients of the array, with it, and those of the tables."""

        def loss(found: Any) -> Any:
            return (found**3 + found * jnp.arange(found.size).reshape(found.shape)).sum(), found

        of = jax.grad(lambda p, w: loss(deal.lookup(p, ids, w if weighted else None)), (0, 1), has_aux=True)
        plainly = jax.grad(lambda p, w: loss(plain(p, ids, w if weighted else None)), (0, 1), has_aux=True)
        packed = deal.pack(tables)
        (gradient, of_weights), found = of(packed, weights)
        again = deal.pack(deal.unpack(packed))
        return (
            ((deal.unpack(gradient), of_weights), found),
            plainly(tables, weights),
            packed,
            again,
            deal.unpack(packed),
        )

    with jax.enable_x64(True):
        tables, ids, weights = drawn(named(rows), members, len(rows))
        ours, theirs, packed, again, unpacked = both(tables, ids, weights)
        assert packed.shape == (devices, deal.slot_rows, WIDTH)
        assert ours[1].dtype == np.float64
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-10), ours, theirs)
        jax.tree.map(np.testing.assert_array_equal, unpacked, tables)
        np.testing.assert_array_equal(again, packed)


def test_indices_past_the_end_stay_in_their_table() -> None:
    rows = {"a": 3, "b": 4, "c": 2}
    deal = deal_tables(rows, 2)
    tables, _, _ = drawn(rows, None, 0)
    ids = jnp.array([[-9, 9, 2], [3, -5, -3], [-4, 4, 100]])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            deal.lookup(deal.pack(tables), ids), plain(jax.tree.map(jnp.asarray, tables), ids)
        )


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 50) | st.floats(0, 1e6)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.booleans(),
)
def test_rows_and_loads_are_balanced_together(tables: list[tuple[int, float]], devices: int, measured: bool) -> None:
    """No slot has more than the mean and the largest table, in rows and in loads, or more tables than it must."""
    rows, loads = (
        named([r for r, _ in tables]),
        dict(zip(named([0] * len(tables)), (v for _, v in tables), strict=True)),
    )
    deal = deal_tables(rows, devices, loads if measured else None)
    sums, loaded, counts = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    for name, slot in zip(deal.names, deal.slots, strict=True):
        sums[slot] += rows[name]
        loaded[slot] += loads[name]
        counts[slot] += 1
    assert max(sums) - min(sums) <= max(rows.values())
    assert max(sums) <= sum(rows.values()) / devices + max(rows.values())
    assert max(counts) == -(-len(rows) // devices)
    if measured:
        assert max(loaded) <= (sum(loads.values()) / devices + max(loads.values())) * (1 + 1e-12)
    assert deal == deal_tables(rows, devices, loads if measured else None)


def test_tables_that_are_read_most_are_apart() -> None:
    """Loads that all fall on one slot of the deal by rows are dealt out evenly when they are given."""
    rows = named([64, 8, 32, 4, 16, 2, 40, 20])
    by_rows = deal_tables(rows, 2)
    loads = {n: float(s == 0) for n, s in zip(by_rows.names, by_rows.slots, strict=True)}
    deal = deal_tables(rows, 2, loads)
    assert [sum(loads[n] for n, s in zip(deal.names, deal.slots, strict=True) if s == slot) for slot in (0, 1)] == [
        2,
        2,
    ]


def test_tables_lie_where_the_deal_says() -> None:
    deal = deal_tables({"a": 3, "b": 9, "c": 5, "d": 2}, 2)
    assert deal.places == {"a": (1, 0), "b": (0, 0), "c": (1, 3), "d": (0, 9)}
    assert deal.slot_rows == 11
    tables = {n: jnp.full((r, 2), i + 1.0) for i, (n, r) in enumerate(zip(deal.names, deal.rows, strict=True))}
    expected = [[2.0] * 9 + [4.0] * 2, [1.0] * 3 + [3.0] * 5 + [0.0] * 3]
    np.testing.assert_array_equal(deal.pack(tables)[:, :, 0], expected)
    hot = deal_tables({"a": 3, "b": 9, "c": 5, "d": 2}, 2, {"a": 8, "b": 1, "c": 1, "d": 8})
    assert hot.slots[0] != hot.slots[3]


def test_a_deal_is_plain_data() -> None:
    deal = deal_tables(ROWS, 4, {n: float(i) for i, n in enumerate(ROWS)})
    assert TableDeal.from_json(deal.to_json()) == deal
    assert json.loads(deal.to_json())["tables"][1] == {"name": "item", "rows": 96, "slot": deal.slots[1]}
    assert hash(deal) == hash(TableDeal.from_json(deal.to_json()))


def test_mistakes_are_told() -> None:
    deal = deal_tables({"a": 3, "b": 2}, 2)
    packed = deal.pack({"a": jnp.ones((3, 4)), "b": jnp.ones((2, 4))})
    ids = jnp.zeros((5, 2), jnp.int32)
    mistakes = {
        "0 tables": lambda: deal_tables({}, 2),
        "on 0 devices": lambda: deal_tables({"a": 1}, 0),
        "loads": lambda: deal_tables({"a": 1}, 1, {"b": 1.0}),
        "are not those that were dealt": lambda: deal.pack({"a": jnp.ones((3, 4))}),
        "no common width": lambda: deal.pack({"a": jnp.ones((3, 4)), "b": jnp.ones((2, 5))}),
        r"indices int32\[5, 3\]": lambda: deal.lookup(packed, jnp.zeros((5, 3), jnp.int32)),
        r"indices float32\[5, 2\]": lambda: deal.lookup(packed, jnp.zeros((5, 2))),
        r"weights \[5\]": lambda: deal.lookup(packed, ids, jnp.ones(5)),
        r"an array \[2, 4, 4\]": lambda: deal.unpack(jnp.ones((2, 4, 4))),
        "not a deal": lambda: TableDeal.from_json("[]"),
        "format 2": lambda: TableDeal.from_json(deal.to_json().replace('"format": 1', '"format": 2')),
        "in slots": lambda: TableDeal(("a",), (3,), (2,), 2),
        "and 1 slots": lambda: TableDeal(("a", "b"), (3, 2), (0,), 2),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(AutoparError, match=message):
            mistake()


def step(deal: TableDeal) -> Any:
    """A step of tables and a product, by gradient descent."""

    def run(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            found = deal.lookup(p["tables"], batch["ids"])
            return jnp.mean((jnp.tanh(found.reshape(len(found), -1) @ p["w"])[:, 0] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.5 * g, state, grads), value

    return run


@pytest.mark.slow
def test_a_planned_step_has_each_table_whole_on_a_device() -> None:
    """Values of plain lookups on one device; slots are split, indices and rows go by all-to-all."""
    rows = {n: 64 * r for n, r in ROWS.items()}
    deal = deal_tables(rows, 8)
    with jax.enable_x64(True):
        tables, ids, _ = drawn(rows, None, 3)
        tables = jax.tree.map(jnp.asarray, tables)
        random = np.random.default_rng(4)
        state = {"tables": deal.pack(tables), "w": jnp.asarray(random.standard_normal((len(rows) * WIDTH, 1)))}
        batch = {"ids": jnp.asarray(ids, jnp.int32), "y": jnp.asarray(random.standard_normal(EXAMPLES))}
        constraints = {"state/tables": PartitionSpec("slots")}
        options: dict[str, Any] = {"constraints": constraints, "mesh_axes": {"slots": 8}}
        run = autopar.parallelize(step(deal), cluster=toy(8), num_stages=1, num_microbatches=1, **options)
        plan = run.plan(state, batch)
        axes = plan.input_shardings[0]["tables"][0]
        shards = [plan.stages[0].mesh_shape[a] for a in ((axes,) if isinstance(axes, str) else axes)]
        assert np.prod(shards) == 8
        assert any(c.kind == "all-to-all" for c in plan.communication)
        assert max(c.bytes for c in plan.communication) < state["tables"].nbytes / 8

        def expected(state: Any, batch: Any) -> Any:
            def loss(p: Any) -> Any:
                found = plain({n: p["tables"][n] for n in rows}, batch["ids"]).reshape(EXAMPLES, -1)
                return jnp.mean((jnp.tanh(found @ p["w"])[:, 0] - batch["y"]) ** 2)

            value, grads = jax.value_and_grad(loss)(state)
            return jax.tree.map(lambda w, g: w - 0.5 * g, state, grads), value

        after, value = run(state, batch)
        theirs, of_theirs = jax.jit(expected)({**state, "tables": tables}, batch)
        np.testing.assert_allclose(value, of_theirs, 1e-12)
        np.testing.assert_allclose(after["w"], theirs["w"], 1e-10, 1e-12)
        for name, table in deal.unpack(after["tables"]).items():
            np.testing.assert_allclose(table, theirs["tables"][name], 1e-10, 1e-12)
