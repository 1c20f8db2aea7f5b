"""Separate embedding tables as one array: which are packed, the graph that is priced, and what an explanation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir import Graph, verify
from autopar.lower.packed_tables import packed_tables
from autopar.plan import Plan
from benchmarks.family_bytes import CLUSTER
from benchmarks.many_tables import DEVICES, TablesCase, drawn, packed, plan_of

ROWS = {"a": 24, "b": 64, "c": 40}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SGD = optax.sgd(0.1)


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    signature, _ = flatten_call(fn, args, {}, SignatureOptions())
    return trace(fn, signature).graph


def lookups(p: Any, b: Any) -> list[jax.Array]:
    return [p[n][b[n]] for n in ROWS]


def bags(p: Any, b: Any) -> list[jax.Array]:
    return [p[n][b[n]].mean(1) for n in ROWS]


def graph(
    rows: Any = lookups, optimizer: Any = SGD, width: int = 8, members: int = 0, **other: tuple[int, int]
) -> Graph:
    """Of a train step with three tables and a matrix."""
    shapes = {n: (r, width) for n, r in ROWS.items()} | {"w": (3 * width, 4)} | other
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    state = params, jax.eval_shape(optimizer.init, params)
    batch = {n: jax.ShapeDtypeStruct((16, members) if members else (16,), jnp.int32) for n in ROWS}

    def step(state: Any, b: Any) -> Any:
        p, moments = state

        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.concatenate(rows(p, b), -1) @ p["w"]) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        updates, moments = optimizer.update(grads, moments, p)
        return (optax.apply_updates(p, updates), moments), value

    return graph_of(step, state, batch)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("rows", "members"), [(lookups, 0), (bags, 1), (bags, 5)], ids=["rows", "bags of one", "bags"])
def test_three_tables_and_their_moments_are_one_array_each(rows: Any, members: int, optimizer: Any) -> None:
    before = graph(rows, optimizer, members=members)
    found = packed_tables(before, 2)
    assert found is not None and len(found.names) == 3
    verify(found.graph)
    of_tables = [i for i in before.inputs if i.type.rank == 2 and i.type.shape[1:] == (8,)]
    arrays = [i for i in found.graph.inputs if i.type.rank == 3 and i.role != "constant" and i.role != "batch"]
    assert len(of_tables) == 3 * len(arrays)
    # Two tables on one device, the largest on the other.
    assert {i.type.shape for i in arrays} == {(2, 64, 8)}
    updated = {o.updates: o.type for o in found.graph.outputs if o.updates}
    assert all(updated[i.name] == i.type for i in arrays)
    primitives = [op.primitive for op in found.graph.operators]
    assert (primitives.count("gather"), primitives.count("scatter-add")) == (1, 1)
    assert [i.name for i in found.graph.inputs if i.role == "batch"] == ["packed indices"]


def twice(p: Any, b: Any) -> list[jax.Array]:
    return [p["a"][b["a"]] + p["a"][b["b"]], p["b"][b["b"]], p["c"][b["c"]]]


def tied(p: Any, b: Any) -> list[jax.Array]:
    return [x + jnp.tanh(x @ p["a"].T) @ p["a"] for x in lookups(p, b)]


def added(p: Any, b: Any) -> list[jax.Array]:
    return [p["a"][b["a"]], p["b"][b["b"]], (p["c"] + p["d"])[b["c"]]]


@pytest.mark.parametrize(("rows", "left"), [(twice, "bc"), (tied, "bc"), (added, "ab")])
def test_a_table_that_is_read_in_another_way_is_left_as_it_is(rows: Any, left: str) -> None:
    found = packed_tables(graph(rows, d=(40, 8)), 2)
    assert found is not None
    verify(found.graph)
    assert [n[-3] for n in found.names] == list(left)


def test_fewer_than_two_tables_of_a_kind_or_devices_are_not_packed() -> None:
    def widths(p: Any, b: Any) -> list[jax.Array]:
        return [p["a"][b["a"]], p["wide"][b["b"]], p["wider"][b["c"]]]

    assert packed_tables(graph(widths, wide=(24, 4), wider=(24, 12)), 2) is None
    assert packed_tables(graph(), 1) is None


def test_tables_that_are_updated_in_other_ways_are_not_one_array() -> None:
    rates = optax.multi_transform(
        {"slow": SGD, "fast": optax.sgd(0.3)}, {"a": "slow", "b": "slow", "c": "fast", "w": "fast"}
    )
    found = packed_tables(graph(optimizer=rates), 2)
    assert found is not None and [n[-3] for n in found.names] == ["a", "b"]
    verify(found.graph)


def plan_for(case: TablesCase, **options: Any) -> Plan:
    step, args = case.build()
    return autopar.parallelize(step, cluster=CLUSTER, num_stages=1, num_microbatches=1, **options).plan(*args)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_the_price_is_that_of_tables_packed_before_planning(number: int) -> None:
    """Drawn models of as many tables a device, so that no rows of the first matrix are padding."""
    case = drawn(17, number)
    assert len(case.rows) % DEVICES == 0
    plan = plan_for(case)
    assert plan.again is not None
    found = plan.again.packed()
    assert found is not None
    assert found.step_time == pytest.approx(plan_of(packed(case)).step_time, rel=0.01)
    faster = found.step_time < 0.99 * plan.step_time
    said = plan.explain()
    assert ("separate tables" in said) == faster
    if faster:
        assert f"({found.step_time / plan.step_time - 1:+.1%})" in said and f"{len(case.rows)} tables" in said
    assert "separate tables" not in Plan.from_json(plan.to_json()).explain()


def test_packed_tables_that_are_slower_and_constrained_ones_are_not_told_of() -> None:
    few = TablesCase((64, 128, 32, 256), (1, 1, 1, 1), 16, 64)
    slower = plan_for(few)
    assert slower.again is not None
    found = slower.again.packed()
    assert found is not None and found.step_time > slower.step_time
    assert "separate tables" not in slower.explain()
    asked = plan_for(few, constraints={"state[0]['t1']": ()})
    assert asked.again is not None and asked.again.packed() is None
