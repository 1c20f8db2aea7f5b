"""Results of a decorated function have the types of `jax.jit`'s: array or not, dtype, weakly typed, committed."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import autopar
from tests.api.steps import CLUSTER

numbers = st.one_of(
    st.booleans(), st.integers(-9, 9), st.floats(-4, 4, width=16), st.complex_numbers(max_magnitude=4, width=64)
)
dtypes = st.sampled_from(["bool", "int8", "int32", "uint16", "float16", "bfloat16", "float32", "complex64"])


@st.composite
def arrays(draw):
    """A numpy scalar or array, or a jax array: weakly typed or not, bound to a device or not."""
    shape = draw(st.sampled_from([(), (1,), (3,), (8, 2)]))
    dtype = jnp.dtype(draw(dtypes))
    array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 5).astype(dtype)
    kind = draw(st.sampled_from(["scalar", "numpy", "jax", "committed", "weak"]))
    if kind == "scalar":
        return array.ravel()[0]
    if kind == "numpy":
        return array
    if kind == "weak":
        return jnp.asarray(draw(st.sampled_from([2, 0.5]))) * 1
    return jax.device_put(array, jax.devices()[0] if kind == "committed" else None)


leaves = st.one_of(numbers, arrays())
trees = st.recursive(
    leaves, lambda t: st.one_of(st.lists(t, max_size=3), st.dictionaries(st.sampled_from("abc"), t)), max_leaves=6
)


def number(x):
    return jnp.real(jnp.asarray(x)) * 1


#: By name what is done with a leaf of any dtype.
KINDS = {
    "as it is": lambda x: x,
    "asarray": jnp.asarray,
    "array of one": lambda x: jnp.array([x]),
    "stop_gradient": lax.stop_gradient,
    "loop of no trips": lambda x: lax.fori_loop(0, 0, lambda i, c: c, jnp.asarray(x)),
    "with a number": lambda x: jnp.asarray(x) + 1,
    "as float": lambda x: jnp.float32(jnp.real(x)),
    "reduced": lambda x: jnp.sum(jnp.asarray(x)),
    "chosen": lambda x: jnp.where(True, x, 0),
    "carried": lambda x: lax.scan(lambda c, _: (c * 2, c), number(x), None, length=2),
    "full": lambda x: jnp.full((3,), jnp.ravel(x)[0] if np.size(x) else 0),
    "stack with a number": lambda x: jnp.stack([jnp.ravel(number(x))[0], 2]),
    "array of numbers": lambda x: jnp.array([jnp.ravel(number(x))[0], 2.0]),
    "constant": lambda x: (1.5, jnp.zeros(2), np.float16(3)),
}


def types(tree):
    return [
        (type(x).__name__, x.dtype.name, x.weak_type, x.shape, np.asarray(x).tolist()) for x in jax.tree.leaves(tree)
    ]


def assert_as_jit(fn, *args, **options):
    got, want = autopar.parallelize(fn, cluster=CLUSTER, **options)(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert types(got) == types(want)
    return got


@settings(max_examples=15)
@given(trees, st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3, unique=True))
def test_types_of_results_are_those_of_jit(tree, kinds):
    assert_as_jit(lambda t: {k: jax.tree.map(KINDS[k], t) for k in kinds}, tree)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_types_of_results_of_numbers_are_those_of_jit(kind):
    assert_as_jit(lambda t: jax.tree.map(KINDS[kind], t), {"n": 3, "x": 2.0, "b": True, "a": np.float32(1)})


def test_numbers_that_come_back_are_arrays_and_may_be_given_again():
    step = autopar.parallelize(lambda s: {"w": s["w"] + 1, "scale": s["scale"]}, cluster=CLUSTER)
    state = step({"w": np.zeros(8, np.float32), "scale": 0.5})
    assert isinstance(state["scale"], jax.Array) and state["scale"].weak_type
    assert step(state)["w"][0] == 2
    assert len(step.plans()) == 1


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"num_microbatches": 2, "num_stages": 2}])
def test_types_of_results_of_a_step_in_parts(options):
    def step(state, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(state["w"])
        w = jax.tree.map(lambda w, g: w - state["lr"] * g, state["w"], g)
        return {"w": w, "lr": state["lr"], "n": state["n"] + 1, "l": jnp.array([state["lr"], 2.0])}, loss

    state = {"w": {"a": np.ones((8, 16), np.float32), "b": np.ones((16, 8), np.float32)}, "lr": 0.5, "n": 3, "l": 0}
    decorated = autopar.parallelize(step, cluster=CLUSTER, **options)
    got, want = decorated(state, np.ones((16, 8), np.float32)), jax.jit(step)(state, np.ones((16, 8), np.float32))
    assert [t[:4] for t in types(got)] == [t[:4] for t in types(want)]
    assert (got[0]["l"] * np.ones(2, np.float16)).dtype == np.float32


def test_shapes_say_which_results_are_weakly_typed():
    lowered = autopar.parallelize(lambda n: (n, jnp.float32(n)), cluster=CLUSTER).lower(2.0)
    assert [s.weak_type for s in lowered.out_info] == [True, False]


REFUSED = {
    "masked": np.ma.masked_array(np.ones(8, np.float32), np.arange(8) > 3),
    "masked scalar": np.ma.masked_array(1.0, True),
    "other byte order": np.ones(8, np.dtype(np.float32).newbyteorder()),
    "record array": np.rec.array([(1.0, 2)], dtype=[("a", "f4"), ("b", "i4")]),
    "records": np.array([(1.0, 2)], dtype=[("a", "f4"), ("b", "i4")]),
    "objects": np.array([1, None]),
    "long": np.ones(8, np.longdouble),
    "dates": np.array(["2020-01-01", "2021-01-01"], np.datetime64),
    "date": np.datetime64("2020-01-01"),
    "times": np.ones(2, "m8[s]"),
    "text": np.array(["a", "b"]),
    "bytes": np.array([b"a", b"b"]),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_arrays_that_jit_refuses_are_refused(name, inside):
    given = {"a": REFUSED[name]} if inside else REFUSED[name]

    def fn(x):
        return jax.tree.map(jnp.sum, x)

    with pytest.raises((TypeError, ValueError)) as want:
        jax.jit(fn)(given)
    with pytest.raises(want.type):
        autopar.parallelize(fn, cluster=CLUSTER)(given)


def test_a_masked_array_is_refused_in_a_call_that_repeats():
    step = autopar.parallelize(lambda x: x.sum(), cluster=CLUSTER)
    assert step(np.ones(8, np.float32)) == 8
    with pytest.raises(ValueError, match="masked"):
        step(REFUSED["masked"])


ONE_DEVICE = """
import jax, jax.numpy as jnp, numpy as np, autopar
bound = jax.device_put(jnp.ones(8), jax.devices()[0])
free = jnp.ones(8)
cases = {
    "free": (lambda x: (x * 2, x), (free,)),
    "numpy": (lambda x: x * 2, (np.ones(8, np.float32),)),
    "bound": (lambda x: x * 2, (bound,)),
    "one of two": (lambda x, y: x * y, (free, bound)),
    "bound and unread": (lambda x, y: x * 2, (free, bound)),
    "closed over": (lambda x: x * bound, (free,)),
    "number": (lambda n: n, (2.0,)),
    "key": (lambda k: jax.random.normal(k, (8,)), (jax.random.key(0),)),
}
for name, (fn, args) in cases.items():
    step, jitted = autopar.parallelize(fn), jax.jit(fn)
    for _ in range(2):
        got, want = jax.tree.leaves(step(*args)), jax.tree.leaves(jitted(*args))
        assert [g.committed for g in got] == [w.committed for w in want], name
        for g, w in zip(got, want):
            np.testing.assert_array_equal(g, w)
            np.testing.assert_array_equal(jax.jit(lambda a: a + 1)(g), np.asarray(w) + 1)
step = autopar.parallelize(lambda w, x: w + x, donate_argnums=0)
w = step(jnp.zeros(8), free)
assert not w.committed and not step(w, free).committed and w.is_deleted()
print("done")
"""


@pytest.mark.slow
def test_results_on_one_device_are_bound_to_it_where_those_of_jit_are():
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", ONE_DEVICE], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "done", ran.stderr
