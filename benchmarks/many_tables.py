"""Bytes of drawn models with embedding tables, as shares of those of the best sharding by hand.

``python -m benchmarks many_tables [--seed N] [--cases N]`` draws models of 4 to 64 tables with unlike numbers of rows,
members of a bag and widths. Each is compiled for eight CPU devices as planned and by hand: with tables whole (data
parallel), by columns, by rows, on two meshes of 2 x 4, and dealt out whole to devices by rows and loads. One parser
reads all programs, as in `benchmarks.family_bytes`. The model whose tables are dealt out before it is planned
(`packed`) is planned too: its predicted step, as a share of that of the model as it is written, is what a choice to
deal tables out could gain; next to it is what `Plan.explain` says of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar.transforms import TableDeal, deal_tables
from benchmarks.family_bytes import CLUSTER, COLUMN, ROW, Rules, by_hand, planned, sent_bytes
from benchmarks.report import Report, Row, Say

DEVICES = 8
#: Forms of `family_bytes.FORMS` and the layout of tables in them.
BY_HAND: Mapping[str, tuple[str, Rules]] = MappingProxyType(
    {
        "whole": ("data", ()),
        "columns": ("expert", (("t", COLUMN),)),
        "rows": ("expert", (("t", ROW),)),
        "columns on 2 x 4": ("2-D", (("t", COLUMN),)),
        "rows on 2 x 4": ("2-D", (("t", ROW),)),
    }
)


@dataclass(frozen=True)
class TablesCase:
    """One model.

    Args:
        rows: of each table.
        members: of each table those of a bag, which are added up.
        width: of all tables.
        batch: examples.
    """

    rows: tuple[int, ...]
    members: tuple[int, ...]
    width: int
    batch: int

    def __str__(self) -> str:
        bags = f"bags of {min(self.members)} to {max(self.members)}"
        sizes = f"{min(self.rows)} to {max(self.rows)} rows of {self.width}"
        return f"{len(self.rows)} tables, {sizes}, {bags}, batch {self.batch}"

    @property
    def shapes(self) -> tuple[Any, Any]:
        """Parameters and batch."""
        count = len(self.rows)
        weights = {
            "b0": (16, 128),
            "b1": (128, self.width),
            "p0": (count * self.width + self.width, 128),
            "p1": (128, 1),
        }
        weights |= {f"t{i}": (rows, self.width) for i, rows in enumerate(self.rows)}
        batch: dict[str, Any] = {
            f"ids{i}": jax.ShapeDtypeStruct((self.batch, n), jnp.int32) for i, n in enumerate(self.members)
        }
        batch |= {"dense": jax.ShapeDtypeStruct((self.batch, 16), jnp.float32)}
        batch |= {"y": jax.ShapeDtypeStruct((self.batch,), jnp.float32)}
        return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in weights.items()}, batch

    def build(self) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The step with a parameter a table, by gradient descent, and its arguments as shapes."""

        def step(state: Any, b: Any) -> Any:
            (p,) = state

            def loss(p: Any) -> jax.Array:
                rows = [p[f"t{i}"][b[f"ids{i}"]].sum(1) for i in range(len(self.rows))]
                return losses(p, jnp.concatenate(rows, 1), b).mean()

            value, grads = jax.value_and_grad(loss)(p)
            return (jax.tree.map(lambda w, g: w - 0.1 * g, p, grads),), value

        params, batch = self.shapes
        return step, ((params,), batch)


def losses(p: Any, rows: jax.Array, b: Any) -> jax.Array:
    """The loss of each example, from the rows [example, table x width] that were looked up for it."""
    dense = jax.nn.relu(jax.nn.relu(b["dense"] @ p["b0"]) @ p["b1"])
    logits = (jax.nn.relu(jnp.concatenate([dense, rows], 1) @ p["p0"]) @ p["p1"])[:, 0]
    each: jax.Array = optax.sigmoid_binary_cross_entropy(logits, b["y"])
    return each


def drawn(seed: int, number: int) -> TablesCase:
    """Case ``number`` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    count = rng.choice((4, 8, 12, 16, 26, 32, 48, 64))
    rows = tuple(8 * 2 ** rng.randint(3, 10) * rng.randint(1, 3) for _ in range(count))
    members = tuple(rng.choice((1, 1, 1, 2, 4, 8)) for _ in range(count))
    return TablesCase(rows, members, rng.choice((16, 32, 64)), 2 ** rng.randint(7, 11))


@dataclass(frozen=True)
class Slots:
    """Tables of a model, dealt out.

    Args:
        deal: slots of the tables, as many as devices.
        tables: numbers of the tables of each slot.
        most: tables of the slot with the most.
        bags: members of all bags of an example, of the slot with the most.
    """

    deal: TableDeal
    tables: tuple[tuple[int, ...], ...]
    most: int
    bags: int

    def sums(self, case: TablesCase) -> np.ndarray[Any, Any]:
        """What adds up bags: [slots, members of all bags, tables of a slot], 1 where a member is of a table."""
        owner = np.zeros((DEVICES, self.bags, self.most), np.float32)
        for slot, tables in enumerate(self.tables):
            ends = np.cumsum([case.members[t] for t in tables])
            for k, t in enumerate(tables):
                owner[slot, ends[k] - case.members[t] : ends[k], k] = 1
        return owner


def slots_of(case: TablesCase) -> Slots:
    """Tables of a model, dealt out by rows and by members of bags."""
    names = [f"t{i}" for i in range(len(case.rows))]
    loads = {n: float(m) for n, m in zip(names, case.members, strict=True)}
    deal = deal_tables(dict(zip(names, case.rows, strict=True)), DEVICES, loads)
    tables = tuple(tuple(t for t, s in enumerate(deal.slots) if s == slot) for slot in range(DEVICES))
    return Slots(deal, tables, max(map(len, tables)), max(sum(case.members[t] for t in some) for some in tables))


def packed(case: TablesCase) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The step of a model whose state has its tables packed, slot by slot, and its arguments as shapes.

    Indices of an example are in the order of the slots, and rows of ``p0`` too; empty places have rows of zeros.
    """
    slots = slots_of(case)
    owner = slots.sums(case)

    def step(state: Any, b: Any) -> Any:
        (p,) = state

        def loss(p: Any) -> jax.Array:
            rows = jax.vmap(lambda table, at: table[at])(p["tables"], jnp.moveaxis(b["ids"], 1, 0))
            bags = jnp.einsum("sbkw,skm->sbmw", rows, owner)
            return losses(p, jnp.moveaxis(bags, 0, 1).reshape(case.batch, -1), b).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, p, grads),), value

    params, batch = case.shapes
    dense = {k: v for k, v in params.items() if not k.startswith("t")}
    dense["p0"] = jax.ShapeDtypeStruct((DEVICES * slots.most * case.width + case.width, 128), jnp.float32)
    dense["tables"] = jax.ShapeDtypeStruct((DEVICES, slots.deal.slot_rows, case.width), jnp.float32)
    ids = {"ids": jax.ShapeDtypeStruct((case.batch, DEVICES, slots.bags), jnp.int32)}
    return step, ((dense,), {k: batch[k] for k in ("dense", "y")} | ids)


def plan_of(built: tuple[Callable[..., Any], tuple[Any, Any]]) -> autopar.Plan:
    """The plan of a step."""
    step, args = built
    return autopar.parallelize(step, cluster=CLUSTER, num_stages=1, num_microbatches=1).plan(*args)


def packed_shares(case: TablesCase) -> Row:
    """Predicted steps with packed tables over that of the model as it is written.

    ``packed_step/step`` is of the model that is packed before planning, whose first matrix has rows for empty places;
    ``explained_step/step`` is what `Plan.explain` compares the plan with.
    """
    plan = plan_of(case.build())
    explained = None if plan.again is None else plan.again.packed()
    assert explained is not None and explained.step_time is not None
    return {
        "packed_step/step": plan_of(packed(case)).step_time / plan.step_time,
        "explained_step/step": explained.step_time / plan.step_time,
    }


def dealt_bytes(case: TablesCase) -> float:
    """Bytes that a device sends where each table lies whole on one device, and bags are added up there.

    Indices go to tables and sums come back by all-to-all; slots with fewer tables or members have empty ones.
    """
    slots = slots_of(case)
    deal, most, bags = slots.deal, slots.most, slots.bags
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))

    def body(p: Any, tables: Any, b: Any, ids: Any) -> Any:
        ids = jax.lax.all_to_all(ids[0], "x", 0, 0, tiled=True).reshape(-1, bags)  # of all examples, for this slot
        owner = jnp.arange(bags) % most

        def looked(t: Any) -> Any:
            return jax.ops.segment_sum(t[0][ids].swapaxes(0, 1), owner, most).swapaxes(0, 1)

        rows, back = jax.vjp(looked, tables)
        here = jax.lax.all_to_all(rows, "x", 0, 1, tiled=True)

        def loss(q: Any, r: Any) -> Any:
            return losses(q, r[:, : len(case.rows)].reshape(len(r), -1), b).sum() / case.batch

        value, (grads, of_rows) = jax.value_and_grad(loss, argnums=(0, 1))(p, here)
        (of_tables,) = back(jax.lax.all_to_all(of_rows, "x", 1, 0, tiled=True))
        updated = jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.lax.psum(grads, "x"))
        return updated, tables - 0.1 * of_tables, jax.lax.psum(value, "x")

    params, batch = case.shapes
    dense = {k: v for k, v in params.items() if not k.startswith("t")}
    given = {k: batch[k] for k in ("dense", "y")}
    tables = jax.ShapeDtypeStruct((DEVICES, deal.slot_rows, case.width), jnp.float32)
    ids = jax.ShapeDtypeStruct((DEVICES, DEVICES, case.batch // DEVICES * bags), jnp.int32)
    specs = (dict.fromkeys(dense, P()), P("x"), dict.fromkeys(given, P("x")), P("x"))
    outs = (dict.fromkeys(dense, P()), P("x"), P())
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    return sent_bytes(str(jax.jit(run, donate_argnums=(0, 1)).lower(dense, tables, given, ids).compile().as_text()))


def measure(case: TablesCase) -> Row:
    """The row of a model."""
    built = case.build()
    sent = {name: by_hand(built, form, rules) for name, (form, rules) in BY_HAND.items()} | {"dealt": dealt_bytes(case)}
    best = min(sent, key=lambda name: sent[name])
    ours = planned(built)
    row: Row = {
        "case": str(case),
        "bytes": ours,
        "best": best,
        "best_bytes": sent[best],
        "bytes/best": ours / sent[best],
    }
    return row | packed_shares(case) | {f"{name}/best": n / sent[best] for name, n in sent.items()}


def run(quick: bool, say: Say, seed: int = 0, cases: int = 8) -> Report:
    """The benchmark; ``quick`` takes one model."""
    rows = []
    for number in range(1 if quick else cases):
        rows.append(measure(drawn(seed, number)))
        say(f"many_tables: {rows[-1]}")
    met = all(row["bytes/best"] <= 1.0 for row in rows)
    return Report("many_tables", "bytes at most those of the best by hand", tuple(rows), met, (f"seed {seed}",))
