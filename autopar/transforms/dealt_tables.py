"""`deal_tables`: embedding tables that lie whole on devices, dealt out by rows and by measured loads.

Tables of unlike numbers of rows and one width are one array [slots, rows, width]; each table has a place (slot, offset)
in it. Where a plan splits the slots, indices go to tables and rows come back by all-to-all, and gradients stay where
the rows are (table-wise parallelism of DLRM: Naumov et al., arXiv:1906.00091, section 3). Without a plan values are the
same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError


@dataclass(frozen=True)
class TableDeal:
    """Slots of tables; made by `deal_tables`, plain data.

    Args:
        names: of the tables, in the order of the columns of indices.
        rows: of each table.
        slots: of each table the slot that it lies in.
        devices: number of slots.

    Raises:
        AutoparError: they do not fit each other.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    slots: tuple[int, ...]
    devices: int

    def __post_init__(self) -> None:
        """Whether all tables have rows and a slot."""
        count = len(self.names)
        if not count or len(set(self.names)) < count or len(self.rows) != count or len(self.slots) != count:
            _refused(f"{count} names, {len(self.rows)} numbers of rows and {len(self.slots)} slots of tables")
        if min(self.rows) < 1 or self.devices < 1 or not all(0 <= s < self.devices for s in self.slots):
            _refused(f"tables of {min(self.rows)} or more rows in slots {sorted(set(self.slots))} of {self.devices}")

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Slot of each table, and its first row there."""
        filled = [0] * self.devices
        places: dict[str, tuple[int, int]] = {}
        for name, rows, slot in zip(self.names, self.rows, self.slots, strict=True):
            places[name] = slot, filled[slot]
            filled[slot] += rows
        return places

    @property
    def slot_rows(self) -> int:
        """Rows of the fullest slot, which every slot has room for."""
        return max(sum(self.rows[t] for t in members) for members in self._members)

    def pack(self, tables: Mapping[str, Any]) -> jax.Array:
        """Tables [rows, width] by name as one array [slots, rows, width], with zeros after the last table of a slot.

        Raises:
            AutoparError: names, numbers of rows or widths are not those of the deal.
        """
        shapes = {name: jnp.shape(table) for name, table in tables.items()}
        widths = {shape[1:] for shape in shapes.values()}
        if {n: s[:1] for n, s in shapes.items()} != {n: (r,) for n, r in zip(self.names, self.rows, strict=True)}:
            _refused(f"tables {shapes} are not those that were dealt: {dict(zip(self.names, self.rows, strict=True))}")
        if len(widths) != 1 or len(next(iter(widths))) != 1:
            _refused(f"tables {shapes} have no common width")
        (width,) = widths.pop()
        dtype = jnp.result_type(*tables.values())
        none = jnp.zeros((0, width), dtype)
        slots = [jnp.concatenate([none, *(tables[self.names[t]] for t in m)]) for m in self._members]
        return jnp.stack([jnp.pad(s, ((0, self.slot_rows - len(s)), (0, 0))) for s in slots])

    def unpack(self, packed: Any) -> dict[str, Any]:
        """Tables by name of an array as `pack` makes it: of parameters, of their moments, of gradients."""
        self._expect(packed)
        places = self.places
        ends = {n: places[n][1] + r for n, r in zip(self.names, self.rows, strict=True)}
        return {n: packed[slot, start : ends[n]] for n, (slot, start) in places.items()}

    def lookup(self, packed: Any, ids: Any, weights: Any = None) -> jax.Array:
        """Rows of all tables for each example; those of a bag are added up before they travel.

        An index below 0 counts from the end of its table, one past the end is the last row, as in ``table[ids]``.

        Args:
            packed: [slots, rows, width], as `pack` makes it.
            ids: whole numbers [examples, tables], or [examples, tables, members of a bag]; tables as in ``names``.
            weights: as ``ids``, what each row is multiplied by: 0 for members that a bag does not have.

        Returns:
            [examples, tables, width].

        Raises:
            AutoparError: shapes are not those of the deal, or indices are no whole numbers.
        """
        self._expect(packed)
        ids = jnp.asarray(ids)
        if ids.ndim not in (2, 3) or ids.shape[1] != len(self.names) or not jnp.issubdtype(ids.dtype, jnp.integer):
            _refused(f"indices {ids.dtype}{list(ids.shape)} of {len(self.names)} tables")
        if weights is not None and jnp.shape(weights) != ids.shape:
            _refused(f"weights {list(jnp.shape(weights))} of indices {list(ids.shape)}")
        ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
        each = (1, -1) + (1,) * (ids.ndim - 2)
        rows, starts = (jnp.asarray(a, ids.dtype).reshape(each) for a in (self.rows, self._starts))
        inside = jnp.clip(jnp.where(ids < 0, ids + rows, ids), 0, rows - 1)
        embedded = jax.vmap(_rows_at)(packed, self._by_slot(inside + starts))
        if weights is not None:
            embedded = embedded * self._by_slot(jnp.asarray(weights))[..., None]
        if ids.ndim == 3:
            embedded = embedded.sum(-2)
        return self._by_table(embedded)

    def to_json(self) -> str:
        """The deal as text."""
        tables = [{"name": n, "rows": r, "slot": s} for n, r, s in zip(self.names, self.rows, self.slots, strict=True)]
        return json.dumps({"format": 1, "devices": self.devices, "tables": tables}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> TableDeal:
        """A deal that `to_json` wrote.

        Raises:
            AutoparError: the text is no deal.
        """
        try:
            data = json.loads(text)
            tables = data["tables"]
            names = tuple(str(t["name"]) for t in tables)
            rows, slots = (tuple(int(t[key]) for t in tables) for key in ("rows", "slot"))
            devices, form = int(data["devices"]), data["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise _error(f"this is not a deal of tables: {error!r}") from error
        if form != 1:
            _refused(f"a deal of format {form}, known is 1")
        return cls(names, rows, slots, devices)

    @property
    def _members(self) -> list[list[int]]:
        """Tables of each slot, as they lie."""
        return [[t for t, s in enumerate(self.slots) if s == slot] for slot in range(self.devices)]

    @property
    def _starts(self) -> list[int]:
        return [start for _, start in self.places.values()]

    @property
    def _columns(self) -> NDArray[np.int32]:
        """Tables of each slot [slots, most of a slot]; a slot with fewer has its first once more."""
        members = self._members
        most = max(map(len, members))
        return np.array([m + [m[0] if m else 0] * (most - len(m)) for m in members], np.int32)

    def _by_slot(self, values: jax.Array) -> jax.Array:
        """[examples, tables, ...] as [slots, examples, tables of the slot, ...]."""
        columns = self._columns
        if np.array_equal(columns.ravel(), np.arange(len(self.names))):
            taken = values
        else:
            taken = values.at[:, columns.ravel()].get(mode="promise_in_bounds")
        return jnp.moveaxis(taken.reshape(len(values), *columns.shape, *values.shape[2:]), 1, 0)

    def _by_table(self, rows: jax.Array) -> jax.Array:
        """[slots, examples, tables of the slot, width] as [examples, tables, width]."""
        most = self._columns.shape[1]
        flat = jnp.moveaxis(rows, 0, 1).reshape(rows.shape[1], -1, rows.shape[-1])
        members = self._members
        places = np.array([slot * most + members[slot].index(table) for table, slot in enumerate(self.slots)])
        if np.array_equal(places, np.arange(flat.shape[1])):
            return flat
        return flat.at[:, places].get(mode="promise_in_bounds", unique_indices=True)

    def _expect(self, packed: Any) -> None:
        shape = jnp.shape(packed)
        if len(shape) != 3 or shape[:2] != (self.devices, self.slot_rows):
            _refused(f"an array {list(shape)} for [{self.devices}, {self.slot_rows}, width]")


def deal_tables(rows: Mapping[str, int], devices: int, loads: Mapping[str, float] | None = None) -> TableDeal:
    """Tables dealt out to devices, as many to each, so that rows and loads are balanced together.

    Tables go out in rounds, the largest loads first, one to each device in a round; in a round the one with the most
    rows goes to the device that has the fewest (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, section 5).
    In a later round no load is above any of the round before, so that no device has more than the mean load and the
    largest one; and rows of two devices never differ by more than those of the largest table.

    Args:
        rows: of each table by name, in the order of the columns of indices.
        devices: that the plan splits slots over.
        loads: of each table what it has to do, as measured lookups; None where all are as often read.

    Raises:
        AutoparError: there are no tables, no devices, or loads are of other tables or no positive numbers.
    """
    names = tuple(rows)
    if devices < 1 or not names or min(rows.values()) < 1:
        _refused(f"{len(names)} tables of {min(rows.values(), default=0)} or more rows on {devices} devices")
    asked = dict.fromkeys(names, 0.0) if loads is None else dict(loads)
    if set(asked) != set(names) or not all(math.isfinite(v) and v >= 0 for v in asked.values()):
        _refused(f"loads {asked} of tables {list(names)}")
    order = sorted(range(len(names)), key=lambda t: (-asked[names[t]], -rows[names[t]], t))
    slots, filled = [0] * len(names), [0] * devices
    for first in range(0, len(names), devices):
        in_round = sorted(order[first : first + devices], key=lambda t: (-rows[names[t]], t))
        emptiest = sorted(range(devices), key=lambda slot: (filled[slot], slot))
        for table, slot in zip(in_round, emptiest, strict=False):
            slots[table] = slot
            filled[slot] += rows[names[table]]
    return TableDeal(names, tuple(int(rows[n]) for n in names), tuple(slots), devices)


def _rows_at(slot: jax.Array, at: jax.Array) -> jax.Array:
    return slot.at[at].get(mode="promise_in_bounds")


def _error(what: str) -> AutoparError:
    return AutoparError(
        what,
        cause="tables, indices and the array of tables are not those of one deal",
        remedy="deal the tables that are looked up, and pack them by that deal",
    )


def _refused(what: str) -> NoReturn:
    raise _error(what)
