"""Which rule an operator gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.errors import AutoparError
from autopar.ir import Operator, TensorType, Value
from autopar.sharding import Factor, Rule, register_rule, replicated_rule, rule_for, unregister_rule
from autopar.sharding.halo import Halo
from autopar.sharding.registry import BUILT_IN, RuleRegistry

F = TensorType((8, 4), "f32")


def operator(primitive: str, *results: TensorType) -> Operator:
    values = tuple(Value(f"r{i}", t) for i, t in enumerate(results or (F,)))
    return Operator(f"{primitive}.0", primitive, ("a",), values, source="model.py:3 (layer)")


def rows(op: Operator, types: tuple[TensorType, ...]) -> Rule:
    return Rule((Factor(8),), ((0, None),), ((0, None),))


@pytest.fixture
def kernel() -> Iterator[str]:
    register_rule("test_kernel", rows)
    yield "test_kernel"
    unregister_rule("test_kernel")


def test_unknown_primitive_is_whole() -> None:
    op = operator("no_such_primitive")
    assert rule_for(op, (F,)) == (replicated_rule(op, (F,)), False)


def test_registered_rule_is_used(kernel: str) -> None:
    assert rule_for(operator(kernel), (F,)) == (rows(operator(kernel), (F,)), True)


def test_registered_rule_hides_a_built_in_one_until_removed() -> None:
    registry = RuleRegistry()
    before = registry.rule_for(operator("exp"), (F,))
    registry.register("exp", rows)
    assert registry.rule_for(operator("exp"), (F,))[0].factors == (Factor(8),)
    registry.remove("exp")
    assert registry.rule_for(operator("exp"), (F,)) == before
    with pytest.raises(KeyError):
        registry.remove("exp")


def test_a_rule_that_does_not_fit_is_the_users_mistake(kernel: str) -> None:
    with pytest.raises(AutoparError, match=r"(?s)the rule of test_kernel .* model\.py:3 \(layer\)") as error:
        rule_for(operator(kernel), (TensorType((8,), "f32"),))
    assert error.value.cause is not None


def test_a_registered_rule_has_no_edges_of_neighbours() -> None:
    registry = RuleRegistry()
    halo = Halo(size=8, count=8, step=1, extent=3, pad=1)
    registry.register("exp", lambda op, types: Rule((Factor(8, halo=halo),), ((0, None),), ((0, None),)))
    with pytest.raises(AutoparError, match="the rule of exp has a factor with a halo"):
        registry.rule_for(operator("exp"), (F,))


def test_registering_a_thing_that_is_no_rule() -> None:
    with pytest.raises(AutoparError, match="sharding rule 'exp' is 'rows', which cannot be called"):
        register_rule("exp", "rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("primitive", sorted(BUILT_IN))
def test_built_in_rules_never_raise(primitive: str) -> None:
    """Operators without the parameters that a rule reads, or of odd shapes, run whole."""
    odd = ((), (F,), (F, TensorType((3,), "f32")), (TensorType((), "key<fry>"),), (F,) * 4)
    for types in odd:
        for results in ((F,), (TensorType((), "token"),), (F, F)):
            op = operator(primitive, *results)
            rule, _ = rule_for(op, types)
            assert [len(d) for d in rule.operands] == [t.rank for t in types]
            assert [len(d) for d in rule.results] == [t.rank for t in results]
