"""Elementwise primitives in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p

from autopar.lower.localize.integers import upper_half
from autopar.sharding.registry import BUILT_IN
from autopar.sharding.rules.elementwise import plain
from tests.lower.harness import MESHES, case_of, check_localized

RNG = np.random.default_rng
F, INT, B = "f32", "i32", "bool"


def array(kind: str, shape: tuple[int, ...] = (8, 4), seed: int = 0) -> Any:
    rng = RNG(seed)
    if kind == INT:
        return rng.integers(1, 30, shape).astype(np.int32)
    if kind == B:
        return rng.random(shape) < 0.5
    if kind == "c64":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
    return rng.uniform(0.1, 0.9, shape).astype(np.float32)


UNARY: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("abs", lax.abs, F),
    ("acos", lax.acos, F),
    ("asin", lax.asin, F),
    ("atan", lax.atan, F),
    ("atanh", lax.atanh, F),
    ("bessel_i0e", lax.bessel_i0e, F),
    ("cbrt", lax.cbrt, F),
    ("ceil", lax.ceil, F),
    ("clz", lax.clz, INT),
    ("conj", lax.conj, "c64"),
    ("copy", jnp.copy, F),
    ("cos", lax.cos, F),
    ("cosh", lax.cosh, F),
    ("digamma", lax.digamma, F),
    ("erf", lax.erf, F),
    ("erf_inv", lax.erf_inv, F),
    ("erfc", lax.erfc, F),
    ("exp", lax.exp, F),
    ("exp2", lax.exp2, F),
    ("expm1", lax.expm1, F),
    ("floor", lax.floor, F),
    ("imag", lax.imag, "c64"),
    ("integer_pow", lambda x: lax.integer_pow(x, 3), F),
    ("is_finite", lax.is_finite, F),
    ("lgamma", lax.lgamma, F),
    ("log", lax.log, F),
    ("log1p", lax.log1p, F),
    ("logistic", lax.logistic, F),
    ("neg", lax.neg, F),
    ("neg", lax.neg, INT),
    ("not", lax.bitwise_not, B),
    ("population_count", lax.population_count, INT),
    ("real", lax.real, "c64"),
    ("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), F),
    ("round", lax.round, F),
    ("rsqrt", lax.rsqrt, F),
    ("sign", lax.sign, F),
    ("sin", lax.sin, F),
    ("sinh", lax.sinh, F),
    ("sqrt", lax.sqrt, F),
    ("square", lax.square, F),
    ("tan", lax.tan, F),
    ("tanh", lax.tanh, F),
    ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.bfloat16), F),
    ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.int32), F),
    ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.int8), INT),
    ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.float32), INT),
    ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.float32), B),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), F),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int16), F),
    # Older jax writes these with other primitives.
    *((name, getattr(lax, name), F) for name in ("log2", "one_minus_square") if hasattr(lax, name)),
)

BINARY: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("add", lax.add, F),
    ("add", lax.add, INT),
    ("sub", lax.sub, F),
    ("mul", lax.mul, F),
    ("mul", lax.mul, INT),
    ("div", lax.div, F),
    ("div", lax.div, INT),
    ("rem", lax.rem, INT),
    ("pow", lax.pow, F),
    ("max", lax.max, F),
    ("min", lax.min, INT),
    ("atan2", lax.atan2, F),
    ("complex", lax.complex, F),
    ("nextafter", lax.nextafter, F),
    ("and", lax.bitwise_and, B),
    ("or", lax.bitwise_or, INT),
    ("xor", lax.bitwise_xor, INT),
    ("shift_left", lax.shift_left, INT),
    ("shift_right_logical", lax.shift_right_logical, INT),
    ("shift_right_arithmetic", lax.shift_right_arithmetic, INT),
    ("eq", lax.eq, INT),
    ("ne", lax.ne, INT),
    ("lt", lax.lt, F),
    ("le", lax.le, F),
    ("gt", lax.gt, F),
    ("ge", lax.ge, F),
)


def limit(name: str) -> int:
    """Strategies to run: of all primitives that are not linear the rule and the localizer are one and the same."""
    return 2 if BUILT_IN[name] is plain else 6


def ids(rows: tuple[tuple[str, Any, str], ...]) -> list[str]:
    return [f"{name}-{kind}-{i}" for i, (name, _, kind) in enumerate(rows)]


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "function", "kind"), UNARY, ids=ids(UNARY))
def test_unary(name: str, function: Callable[..., Any], kind: str) -> None:
    check_localized(function, array(kind), primitive=name, meshes=MESHES[1:2], limit=limit(name))


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "function", "kind"), BINARY, ids=ids(BINARY))
def test_binary(name: str, function: Callable[..., Any], kind: str) -> None:
    operands = array(kind), array(kind, seed=1)
    check_localized(function, *operands, primitive=name, meshes=MESHES[1:2], limit=limit(name))


@pytest.mark.skipif(not hasattr(lax, "mulhi"), reason="of jax 0.10")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_upper_halves_of_products(x64: None, dtype: str) -> None:
    """XLA does not take the primitive from a manual region; against Python's integers, extremes among them."""
    info = np.iinfo(dtype)
    some = [info.min, info.min + 1, -1 % (info.max + 1), 0, 1, 2, info.max // 2 + 1, info.max - 1, info.max]
    drawn = RNG(0).integers(info.min, info.max, 23, dtype=dtype, endpoint=True)
    values = np.concatenate([np.array(some, dtype), drawn])
    x, y = (np.ascontiguousarray(v) for v in np.meshgrid(values, values))
    bits = 8 * x.dtype.itemsize
    want = np.vectorize(lambda a, b: int(a) * int(b) >> bits, otypes=[dtype])(x, y)
    np.testing.assert_array_equal(upper_half(None, {}, [x, y], None)[0], want)  # type: ignore[arg-type]
    if dtype == "int32":
        np.testing.assert_array_equal(lax.mulhi(x, y), want)
        check_localized(lax.mulhi, x, y, primitive="mulhi", meshes=MESHES[1:2], limit=2)


@pytest.mark.skipif(not hasattr(lax, "polynomial"), reason="this jax writes polynomials out")
def test_polynomial_of_coefficients_that_are_scalars_arrays_and_rows() -> None:
    coefficients = [array(F, (), 1), array(F, (8, 4), 2), array(F, (1, 4), 3)]
    check_localized(
        lambda x, *c: lax.polynomial(x, c), array(F), *coefficients, primitive="polynomial", meshes=MESHES[1:2], limit=4
    )


@pytest.mark.parametrize("shape", [(), (8, 4), (3, 5)])
def test_sum_in_every_strategy(shape: tuple[int, ...]) -> None:
    # No dim of (3, 5) can be split: only the linear group is left.
    check_localized(lax.add, array(F, shape), array(F, shape, 1), primitive="add", least=10)


def test_product_in_every_strategy() -> None:
    ran = check_localized(lax.mul, array(F), array(F, seed=1), primitive="mul", meshes=MESHES[1:2])
    # One axis may hold terms of one operand and the other axis terms of the other.
    assert any(all(layout.partial for layout in s.operand_layouts) for s in ran)


@pytest.mark.parametrize("scalar", [False, True])
def test_select(scalar: bool) -> None:
    predicate = array(B, () if scalar else (8, 4))
    ran = check_localized(lax.select, predicate, array(F), array(F, seed=1), primitive="select_n", meshes=MESHES[1:2])
    assert any(s.result_layouts[0].partial for s in ran)


def test_select_of_three_cases() -> None:
    which = RNG(0).integers(0, 3, (8, 4)).astype(np.int32)
    check_localized(
        lambda w, *cases: lax.select_n(w, *cases), which, *(array(F, seed=i) for i in range(3)), meshes=MESHES[:1]
    )


@pytest.mark.parametrize("scalar", [False, True])
def test_clamp(scalar: bool) -> None:
    low, high = (array(F, () if scalar else (8, 4), seed) * 0.5 for seed in (1, 2))
    check_localized(lax.clamp, low, array(F), low + high, primitive="clamp", meshes=MESHES[2:])


def test_integer_division_and_int_to_float_are_not_linear() -> None:
    assert case_of(lax.div, array(INT), array(INT)).rule.linear == ()
    assert case_of(lax.div, array(F), array(F)).rule.linear == ((0,),)
    assert case_of(lambda x: x.astype(jnp.float32), jnp.asarray(array(INT))).rule.linear == ()
    # A wider integer would see the sum before it wraps.
    assert case_of(lambda x: lax.convert_element_type(x, jnp.int32), array(INT).astype(np.int8)).rule.linear == ()


def test_threefry_broadcasts() -> None:
    words = [RNG(i).integers(0, 2**32, s, dtype=np.uint32) for i, s in enumerate([(1, 4), (1, 4), (8, 4), (8, 4)])]
    check_localized(lambda *w: threefry2x32_p.bind(*w), *words, primitive="threefry2x32", meshes=MESHES[1:2], limit=5)


@pytest.mark.slow
def test_random_gamma_of_key_array() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    alpha = array(F, (8,)) + 1
    check_localized(jax.vmap(jax.random.gamma), keys, alpha, primitive="random_gamma", meshes=MESHES[:1])
