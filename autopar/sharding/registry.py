"""The table from primitive to sharding rule: the built-in files of ``rules``, and what users register.

A file of ``rules`` holds a constant ``RULES``, from primitive name to `RuleFunction`; a new file needs
nothing else. The user's registrations are the only state: one `RuleRegistry`, changed by
`register_rule` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.errors.base import as_kind
from autopar.errors.names import near_names
from autopar.errors.offers import Call, Interface
from autopar.hooks import tables_of
from autopar.ir import Operator, TensorType
from autopar.sharding import rules
from autopar.sharding.factors import Rule, RuleFunction, replicated_rule

BUILT_IN: Mapping[str, RuleFunction] = tables_of(rules.__name__, rules.__path__, "RULES")


_INTERFACE = Interface(
    "sharding rule",
    rule="register_rule takes the name of a primitive and a function of an operator and its operands' types",
    remedy='register_rule("my_primitive", my_rule), where my_rule(op, operand_types) returns a Rule, or None',
    call=Call(("op", "operand_types")),
)


class RuleRegistry:
    """Rules that users add to the built-in ones. A registered rule hides a built-in one of its name."""

    def __init__(self) -> None:
        self._added: dict[str, RuleFunction] = {}

    def register(self, primitive: str, rule: RuleFunction) -> None:
        """Use ``rule`` for ``primitive`` from now on. Registering again replaces."""
        _INTERFACE.check(primitive, rule)
        self._added[primitive] = rule

    def remove(self, primitive: str) -> None:
        """Forget what was registered for ``primitive``; a built-in rule shows again.

        Raises:
            AutoparError: nothing was registered; the error is a KeyError too.
        """
        if primitive not in self._added:
            unknown = AutoparError(
                f"no sharding rule is registered for {primitive!r}",
                remedy=near_names(str(primitive), self.names) or "register_rule registers one",
            )
            raise as_kind(unknown, KeyError)
        del self._added[primitive]

    @property
    def names(self) -> tuple[str, ...]:
        """Primitives that something is registered for, sorted."""
        return tuple(sorted(self._added))

    def rule_for(self, op: Operator, operand_types: tuple[TensorType, ...]) -> tuple[Rule, bool]:
        """The rule of an operator, a registered one before a built-in one, and whether its primitive is known."""
        added = self._added.get(op.primitive)
        if added is None:
            rule, known = _built_in(op, operand_types)
            return (rule, True) if rule is not None and known else (replicated_rule(op, operand_types), known)
        rule = added(op, operand_types)
        if not isinstance(rule, Rule | None):
            raise AutoparError(
                f"the rule of {op.primitive} returned {rule!r}",
                cause="a rule is a function of an operator and its operands' types that returns a Rule, or None",
                remedy="return autopar.sharding.Rule(...), or None where nothing can be split",
                source=op.source or None,
            )
        if rule is not None and not _fits(rule, op, operand_types):
            raise AutoparError(
                f"the rule of {op.primitive} labels operands {rule.operands} and results {rule.results}, "
                f"but the types are {', '.join(map(str, operand_types))} -> "
                f"{', '.join(str(v.type) for v in op.results)}",
                cause="a rule has one label (a factor or None) for each dim of each operand and result",
                source=op.source or None,
            )
        if rule is not None and any(f.halo is not None or f.travels for f in rule.factors):
            raise AutoparError(
                f"the rule of {op.primitive} has a factor with a halo or travels",
                cause="an operator with a registered rule runs on pieces as they lie, without edges of neighbours",
                remedy="leave the dims whole over which its windows slide",
                source=op.source or None,
            )
        return (replicated_rule(op, operand_types) if rule is None else rule), True


def _built_in(op: Operator, operand_types: tuple[TensorType, ...]) -> tuple[Rule | None, bool]:
    """The built-in rule, or None, and whether no rule is missing: there is one, or there is no dim to split."""
    function = BUILT_IN.get(op.primitive)
    if function is None:
        return None, not any(t.rank for t in (*operand_types, *(v.type for v in op.results)))
    try:
        rule = function(op, operand_types)
    except (LookupError, TypeError, ValueError):
        # Parameters of a jax version that the rule was not written for: whole is slower, but right.
        return None, False
    return rule, rule is None or _fits(rule, op, operand_types)


def _fits(rule: Rule, op: Operator, operand_types: tuple[TensorType, ...]) -> bool:
    """Whether ``rule`` has as many labels as the operator has operands, results and dims."""
    ranks = ([t.rank for t in operand_types], [v.type.rank for v in op.results])
    named = [i for group in (*rule.linear, *(f.partial_operands for f in rule.factors)) for i in group]
    return ranks == ([len(d) for d in rule.operands], [len(d) for d in rule.results]) and all(
        0 <= i < len(operand_types) for i in named
    )


_REGISTRY = RuleRegistry()


def register_rule(primitive: str, rule: RuleFunction) -> None:
    """Teach the planner how a primitive may be split.

    Args:
        primitive: jax's name of it, as ``"my_kernel"``.
        rule: called with an operator and the types of its operands; returns a `Rule`, or None where this operator has
            to run whole on every device. A rule must be deterministic.

    Registering again replaces. A rule for a primitive that autopar knows hides the built-in one. The operator runs on
    local shards with its parameters unchanged, so its parameters may not name sizes.
    """
    _REGISTRY.register(primitive, rule)


def unregister_rule(primitive: str) -> None:
    """Undo `register_rule`. Raises an AutoparError that is a KeyError too if nothing is registered."""
    _REGISTRY.remove(primitive)


def registered_rules() -> tuple[str, ...]:
    """Primitives that a user's rule is registered for, sorted."""
    return _REGISTRY.names


def rule_for(op: Operator, operand_types: tuple[TensorType, ...]) -> tuple[Rule, bool]:
    """The rule of an operator, and whether its primitive is known.

    Args:
        op: the operator.
        operand_types: types of its operands (global shapes).

    An unknown primitive gets the rule without factors (whole on every device) and False. AutoparError
    only where a registered rule does not fit the operator's shapes.
    """
    return _REGISTRY.rule_for(op, operand_types)
