"""Rules of the primitives that equinox adds for its loops: identities with a condition on their use, and
reductions that `jax.vmap` leaves alone.

``maybe_set``, ``noinline`` and lineax's ``linear_solve`` hold programs of their own and stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Rule, RuleFunction
from autopar.sharding.rules.elementwise import additive, select
from autopar.sharding.rules.reductions import reduction

_KINDS = MappingProxyType({"unvmap_all": "and", "unvmap_any": "or", "unvmap_max": "max"})


def unmapped(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``unvmap_any`` and its kin: all dims reduced. Of numbers "any" and "all" are of truth, so they stay whole."""
    (type,) = operand_types
    kind: str | None = _KINDS[op.primitive]
    if (kind == "max") == (type.dtype == "bool"):
        kind = None
    return reduction(type.shape, tuple(range(type.rank)), kind, 1, False)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "nonbatchable": additive,
        "nondifferentiable_backward": additive,
        "nontraceable": additive,
        "select_if_vmap": select,
        **dict.fromkeys(_KINDS, unmapped),
    }
)
