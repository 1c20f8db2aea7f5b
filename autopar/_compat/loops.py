"""Parameters of a scan equation, which not every jax gives the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain_params(primitive: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters with those of a scan said in one way on every jax: ``num_consts`` and ``num_carry``.

    Newer ones have trees instead: ``ft_in`` of constants, carry and rows, ``ft_out`` of carry and rows. What shape the
    trees have within says nothing about what is computed.

    Args:
        primitive: name of the equation's primitive.
        params: of the equation.
    """
    if primitive != "scan" or "ft_in" not in params:
        return params
    consts, carry, _ = params["ft_in"].unpack()
    kept = {k: v for k, v in params.items() if k not in ("ft_in", "ft_out")}
    return {**kept, "num_consts": len(consts), "num_carry": len(carry)}
