"""`Record`: the base of all parts of a plan."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base: frozen, compared by value, unknown fields refused."""
