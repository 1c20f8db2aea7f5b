"""Errors of the user's program are of the types that `jax.jit` raises, and of autopar's own where it adds to them."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoparError, TraceError
from autopar.errors import InfeasiblePlanError
from autopar.errors.base import as_kind
from tests.api.steps import CLUSTER

X = np.arange(8, dtype=np.float32)


class Mine(RuntimeError):
    """An error of the user's."""


def raising(error):
    def fn(x):
        raise error

    return fn


#: By name a function that jax cannot trace, or that fails, and whether autopar's error is one of its own too.
FUNCTIONS = {
    "if": (lambda x: x if x[0] > 0 else -x, True),
    "while": (lambda x: [1 for _ in iter(lambda: bool(x[0]), False)], True),
    "and": (lambda x: x[0] and x, True),
    "in": (lambda x: x if x[0] in (1, 2) else -x, True),
    "float": (lambda x: float(x[0]), True),
    "int": (lambda x: int(x[0]), True),
    "index": (lambda x: [1, 2][x[0].astype(int)], True),
    "range": (lambda x: list(range(x[0].astype(int))), True),
    "numpy": (lambda x: np.asarray(x), True),
    "numpy function": (lambda x: np.sin(x), True),
    "mask": (lambda x: x[x > 0], True),
    "nonzero": (lambda x: jnp.nonzero(x), True),
    "unique": (lambda x: jnp.unique(x), True),
    "shape": (lambda x: jnp.ones(x[0]), True),
    "reshape": (lambda x: x.reshape(x[0].astype(int), -1), True),
    "arange": (lambda x: jnp.arange(x[0]), True),
    "bool of a comparison": (lambda x: max(x[0], x[1]), True),
    "text added": (lambda x: x + "a", False),
    "key of a dict": (lambda x: {x: 1}, False),
    "says tracer": (raising(TypeError("no Tracer please")), False),
    "says concrete": (raising(ValueError("concrete values please")), None),
    "shapes": (lambda x: x @ np.ones(7), False),
    "attribute": (lambda x: x.nothing, False),
    "none": (lambda x: x + None, False),
    "assigned": (lambda x: x.__setitem__(0, 1), False),
    "mine": (raising(Mine("mine")), False),
    "key": (raising(KeyError("k")), False),
    "assertion": (raising(AssertionError("no")), False),
    "stop": (raising(StopIteration("no")), False),
    "arguments": (lambda x, y: x, False),
}


@pytest.mark.few(36)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}])
def test_an_error_while_a_function_is_traced(name, options):
    fn, own = FUNCTIONS[name]
    with pytest.raises(Exception) as want:
        jax.jit(fn)(X)
    with pytest.raises(want.type) as got:
        autopar.parallelize(fn, cluster=CLUSTER, **options)(X)
    if own is not None:
        assert isinstance(got.value, TraceError) == own
    if own:
        assert "test_error_types.py" in (got.value.source or "")
        assert isinstance(got.value.__cause__, want.type)
        assert got.type.__name__ == "TraceError"
    elif own is False:
        assert got.type is want.type
        assert str(got.value).split("\n")[0] == str(want.value).split("\n")[0]


CALLS = {
    "static that cannot be hashed": lambda make: make(lambda x, s: x, static_argnums=1)(X, [1]),
    "leaf that cannot be hashed": lambda make: make(lambda x, s: x)(X, {1, 2}),
    "too large": lambda make: make(lambda x, n: x)(X, 2**80),
    "too many": lambda make: make(lambda x: x)(X, X),
    "static position": lambda make: make(lambda x: x, static_argnums=3),
    "donated position": lambda make: make(lambda x: x, donate_argnums=3),
    "static name": lambda make: make(lambda x: x, static_argnames="z"),
    "no function": lambda make: make(3),
    "compiled for another shape": lambda make: make(lambda x: x).lower(X).compile()(X[:4]),
    "compiled for another dtype": lambda make: make(lambda x: x).lower(X).compile()(X.astype(np.int32)),
    "compiled for another tree": lambda make: make(lambda x: x).lower(X).compile()([X]),
    "masked": lambda make: make(lambda x: x)(np.ma.masked_array(X, X > 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_a_call(name):
    with pytest.raises(Exception) as want:
        CALLS[name](jax.jit)
    with pytest.raises(want.type):
        CALLS[name](lambda fn, **options: autopar.parallelize(fn, cluster=CLUSTER, **options))


def test_a_donated_array_that_is_given_again():
    step = autopar.parallelize(lambda x: x + 1, cluster=CLUSTER, donate_argnums=0)
    x = step.shard(np.ones(8, np.float32))
    step(x)
    with pytest.raises(RuntimeError) as got:
        step(x)
    assert isinstance(got.value, AutoparError)


def test_a_value_that_was_kept_while_another_function_was_traced():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(lambda x: x + kept[0])(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as got:
        autopar.parallelize(lambda x: x + kept[0], cluster=CLUSTER)(X)
    assert isinstance(got.value, TraceError)


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, RuntimeError, OverflowError, jax.errors.TracerBoolConversionError]
)
def test_an_error_of_two_types_is_as_the_one_it_was_made_of(kind):
    error = InfeasiblePlanError("too much", least_bytes=3, cause="c", remedy="r", source="s")
    both = as_kind(error, kind)
    again = pickle.loads(pickle.dumps(both))
    for one in (both, again):
        assert isinstance(one, kind)
        assert isinstance(one, InfeasiblePlanError)
        assert (str(one), one.least_bytes, one.remedy) == (str(error), 3, "r")
        assert type(one) is type(both)
    assert as_kind(both, kind) is both
