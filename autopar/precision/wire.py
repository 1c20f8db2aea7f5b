"""`Wire`: in which formats weights and gradients are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.formats import FORMATS, WireFormat

#: What may be sent in a format of its own.
ROLES = ("gradients", "weights")

#: Formats of what is sent; one bit an element needs error feedback (`autopar.transforms.one_bit_adam`).
WIRE_FORMATS = tuple(name for name in FORMATS if name != "sign")


@dataclass(frozen=True)
class Wire:
    """Formats by role, ZeRO++'s qwZ and qgZ (Wang et al., 2023) among them.

    Values of two dims and more are sent so; scalars and vectors as they are. Each element that a device receives is off
    by at most half a step of its block a term; sums are taken in float32 after decoding.

    Args:
        gradients: what adds up gradients on their way to the update; None: in their own dtype.
        weights: what gathers parameters for the forward and the backward pass; the update reads masters. None as above.
    """

    gradients: WireFormat | None = None
    weights: WireFormat | None = None


def wire_of(given: Any) -> Wire | None:
    """A `Wire` from what `autopar.parallelize` is given: a mapping from roles to formats or their names.

    Raises:
        AutoparError: a role or a format is unknown.
    """
    if given is None or isinstance(given, Wire):
        return given
    if not isinstance(given, Mapping):
        raise AutoparError(f"wire={given!r} is no mapping", remedy='wire={"gradients": "int8", "weights": "int8"}')
    unknown = [role for role in given if role not in ROLES]
    if unknown:
        raise AutoparError(f"wire has {unknown[0]!r}, which is not a role", remedy=f"roles are {', '.join(ROLES)}")
    return Wire(**{role: _format_of(role, value) for role, value in given.items()})


def _format_of(role: str, value: Any) -> WireFormat | None:
    name = value.name if isinstance(value, WireFormat) else value
    if name is not None and name not in WIRE_FORMATS:
        raise AutoparError(
            f"wire[{role!r}]={value!r} is not a wire format", remedy=f"one of {', '.join(WIRE_FORMATS)}, or None"
        )
    return WireFormat(value.name, value.block) if isinstance(value, WireFormat) else value and WireFormat(value)
