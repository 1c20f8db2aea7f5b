"""Splittable dims: rules of primitives, and the strategies that they allow on a mesh."""

from autopar.sharding.factors import Factor, Rule, RuleFunction, replicated_rule
from autopar.sharding.registry import register_rule, rule_for, unregister_rule
from autopar.sharding.strategies import Assignment, Strategy, strategies

__all__ = [
    "Assignment",
    "Factor",
    "Rule",
    "RuleFunction",
    "Strategy",
    "register_rule",
    "replicated_rule",
    "rule_for",
    "strategies",
    "unregister_rule",
]
