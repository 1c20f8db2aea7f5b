"""A small DLRM with its tables dealt out by hand: each device has one whole, and ids and rows go by all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from autopar.transforms import deal_tables

TABLES, ROWS, WIDTH, BATCH = 8, 4096, 64, 1024
#: Weights of the perceptrons at the bottom and at the top.
DENSE: Mapping[str, tuple[int, ...]] = {
    "b0": (16, 256),
    "b1": (256, WIDTH),
    "p0": (TABLES * (TABLES + 1) // 2 + WIDTH, 256),
    "p1": (256, 1),
}
#: Options of a plan in which each packed table lies whole on one device.
SPLIT_SLOTS: Mapping[str, Any] = {"constraints": {"p/tables": P("slots")}, "mesh_axes": {"slots": TABLES}}


def _shapes(weights: Mapping[str, tuple[int, ...]]) -> tuple[Any, Any]:
    ids = {"ids": jax.ShapeDtypeStruct((BATCH, TABLES), jnp.int32)}
    dense = {"dense": jax.ShapeDtypeStruct((BATCH, 16), jnp.float32), "y": jax.ShapeDtypeStruct((BATCH,), jnp.float32)}
    return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in weights.items()}, ids | dense


def _losses(p: Any, rows: jax.Array, b: Any) -> jax.Array:
    """The loss of each example, from the ``rows`` [example, table, width] that were looked up for it."""
    dense = jax.nn.relu(jax.nn.relu(b["dense"] @ p["b0"]) @ p["b1"])
    features = jnp.concatenate([dense[:, None], rows], 1)
    pairs = jnp.einsum("bid,bjd->bij", features, features)[:, *jnp.triu_indices(TABLES + 1, 1)]
    logits = (jax.nn.relu(jnp.concatenate([dense, pairs], 1) @ p["p0"]) @ p["p1"])[:, 0]
    losses: jax.Array = optax.sigmoid_binary_cross_entropy(logits, b["y"])
    return losses


def as_written() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The step with a parameter a table, and its arguments as shapes."""

    def step(p: Any, b: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            rows = jnp.stack([p[f"t{i}"][b["ids"][:, i]] for i in range(TABLES)], 1)
            return _losses(p, rows, b).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step, _shapes({**DENSE, **{f"t{i}": (ROWS, WIDTH) for i in range(TABLES)}})


def dealt() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The step with tables that `deal_tables` packed, and its arguments as shapes."""
    deal = deal_tables({f"t{i}": ROWS for i in range(TABLES)}, TABLES)

    def step(p: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: _losses(p, deal.lookup(p["tables"], b["ids"]), b).mean())(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step, _shapes({**DENSE, "tables": (TABLES, ROWS, WIDTH)})


def table_wise() -> str:
    """Optimized HLO of the step by hand on as many devices as tables."""
    mesh = jax.make_mesh((TABLES,), ("x",), axis_types=(AxisType.Auto,))

    def body(p: Any, b: Any) -> Any:
        ids = jax.lax.all_to_all(b["ids"], "x", 1, 0, tiled=True)[:, 0]
        rows, back = jax.vjp(lambda t: t[0][ids][:, None], p["tables"])
        mine = jax.lax.all_to_all(rows, "x", 0, 1, tiled=True)
        dense = {k: p[k] for k in DENSE}
        value, (grads, of_rows) = jax.value_and_grad(lambda q, r: _losses(q, r, b).sum() / BATCH, argnums=(0, 1))(
            dense, mine
        )
        (of_table,) = back(jax.lax.all_to_all(of_rows, "x", 1, 0, tiled=True))
        grads = jax.lax.psum(grads, "x")
        updated = {k: p[k] - 0.1 * grads[k] for k in DENSE} | {"tables": p["tables"] - 0.1 * of_table}
        return updated, jax.lax.psum(value, "x")

    params, batch = _shapes({**DENSE, "tables": (TABLES, ROWS, WIDTH)})
    lies = {k: P("x") if k == "tables" else P() for k in params}
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(lies, dict.fromkeys(batch, P("x"))), out_specs=(lies, P()), check_vma=False
    )
    return str(jax.jit(run, donate_argnums=0).lower(params, batch).compile().as_text())
