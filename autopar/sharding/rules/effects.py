"""Rules of operators that call the host: they run once, on whole values, so nothing of them can be split."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import CALLBACKS
from autopar.sharding.factors import Rule, RuleFunction


def whole(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Rule of operators that run whole on every device."""
    return None


RULES: Mapping[str, RuleFunction] = MappingProxyType(dict.fromkeys(sorted(CALLBACKS), whole))
