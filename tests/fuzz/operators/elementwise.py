"""Elementwise operators, scaled so that values stay near one."""

from __future__ import annotations

from tests.fuzz.draw import Draw

_UNARY = (
    "jnp.sin({x})", "jnp.tanh({x})", "jnp.exp(jnp.tanh({x}))", "jnp.log1p({x} ** 2)", "jnp.sqrt(1 + {x} ** 2)",
    "jax.nn.gelu({x})", "jax.nn.relu({x} + 0.1)", "jax.nn.softplus({x})", "jax.nn.sigmoid({x})", "jax.nn.silu({x})",
    "jnp.abs({x} + 0.1)", "jax.lax.erf({x})", "jax.lax.lgamma(2 + {x} ** 2)", "jax.lax.digamma(2 + {x} ** 2)",
    "jnp.arctan2({x}, 2.0)", "jnp.cbrt(1 + {x} ** 2)", "jnp.square(jnp.sin({x}))", "jax.lax.integer_pow({x}, 3) * 0.1",
    "jnp.arcsinh({x})", "1 / (1.5 + jnp.sin({x}))", "jax.lax.rsqrt(1 + {x} ** 2)", "jax.lax.stop_gradient({x})",
    "jnp.clip({x}, -1, 1)", "jnp.nan_to_num({x})", "{x} * 3", "2 - {x}", "-{x}", "jax.nn.softmax({x})",
    "jax.nn.log_softmax({x}, axis=0)", "jnp.expm1(jnp.tanh({x}))", "jnp.exp2(jnp.tanh({x}))", "jnp.sinc({x})",
    "jnp.cosh(jnp.tanh({x}))", "jax.scipy.special.xlogy({x} ** 2, 1 + {x} ** 2)", "jax.nn.elu({x} + 0.1)",
    "jax.lax.reduce_precision({x}, 11, 52)", "{x}.astype(jnp.complex128).real", "jnp.real({x} * (1 + 2j) * {x})",
    "jnp.abs({x} + 1j)", "jnp.angle(2 + {x} * 0.1j)", "jax.lax.optimization_barrier({x})", "jnp.copy({x})",
    "jax.lax.logistic({x})", "jnp.arctan({x})", "jnp.arcsin(0.9 * jnp.tanh({x}))", "jnp.deg2rad({x}) * 9",
    "jax.lax.erf_inv(0.9 * jnp.tanh({x}))", "jax.scipy.special.i0e({x})", "jnp.where(steps({x}) > 0, {x}, 0)",
    "jax.nn.standardize({x}, axis=0, epsilon=0.1)", "steps({x})", "jnp.fmod({x}, 5.0)", "jax.nn.hard_tanh({x})",
    "jax.nn.glu(jnp.concatenate([{x}, {x} * 2], -1))", "jnp.polyval(jnp.array([0.1, 1.0, 2.0]), {x})",
    "jax.ad_checkpoint.checkpoint_name({x} * 1.5, 'x')", "jnp.modf({x} * 0.1)[0]",
    "jnp.interp({x}, jnp.arange(3.0), jnp.array([1.0, 3.0, 2.0]))",
)  # fmt: skip
_BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / (1.5 + jnp.cos({y}))", "jnp.maximum({x}, {y})", "{y} * 2 + {x}",
    "jnp.minimum({x}, {y} + 0.1)", "jnp.arctan2({x}, 2 + jnp.cos({y}))", "jnp.power(1.5 + jnp.sin({x}), jnp.tanh({y}))",
    "jnp.hypot(1 + {x} ** 2, {y})", "jnp.logaddexp({x}, {y})", "jnp.where(steps({x}) > steps({y}), {x}, {y})",
    "{x} * {y} + {x}", "({x} + 1j * {y}).imag", "jnp.abs({x} + 1j * {y} + 2)", "jax.lax.complex({x}, {x}).real * {y}",
)  # fmt: skip
_WHOLE = (
    "{i} + 3", "{i} * 5 - 7", "{i} // 3", "{i} % 4", "-{i}", "{i} ^ 5", "{i} & 6", "{i} | 9", "~{i}", "{i} << 2",
    "{i} >> 1", "jnp.abs({i} - 3)", "jnp.sign({i} - 2)", "jax.lax.population_count({i})", "jax.lax.clz({i} + 1)",
    "jnp.clip({i}, 1, 5)", "jnp.minimum({i}, 4)", "{i}.astype(jnp.uint8).astype(jnp.int32)", "jnp.square({i})",
    "jnp.power({i} % 3, 2)", "({i} * 70000).astype(jnp.int16).astype(jnp.int32)", "jnp.gcd({i}, 6)",
)  # fmt: skip


def unary(d: Draw) -> None:
    d.add("unary", d.choice(_UNARY).format(x=d.pick()))


def binary(d: Draw) -> None:
    x = d.pick()
    y = d.broadcastable(d.shape_of(x))
    if d.chance(0.3):
        x, y = y, x
    d.add("binary", d.choice(_BINARY).format(x=x, y=y))


def whole(d: Draw) -> None:
    d.add("whole", d.choice(_WHOLE).format(i=d.pick("int")))


def mixed(d: Draw) -> None:
    """Between kinds."""
    x, i, b = d.pick(), d.pick("int"), d.pick("bool")
    texts = (
        f"{x} * ({i} % 3).sum()", f"{b}.astype(jnp.float64)", f"{i}.astype(jnp.float64) * 0.1",
        f"steps({x}).astype(jnp.int32)", f"steps({x}) > 1", f"{i} > 2", f"{i} == {i} // 2", f"~{b}",
        f"jnp.logical_and({b}, {b})", f"{b}.astype(jnp.int32)", f"jnp.isfinite({x})", f"{x} * {b}.any()",
        f"jnp.where({b}, 2, 1)", f"jnp.where({i} > 3, 0.5, 1.5)", f"{i}.astype(jnp.uint32) * 7 % 13 > 5",
        f"jax.lax.bitcast_convert_type({i}, jnp.float32).astype(jnp.float64)",
    )  # fmt: skip
    d.add("mixed", d.choice(texts))


def select(d: Draw) -> None:
    x = d.pick()
    shape = d.shape_of(x)
    y = d.broadcastable(shape)
    found = [n for n in d.visible() if d.types[n].kind == "bool" and d.types[n].shape in ((), shape)]
    p = d.choice(found) if found else d.input("bool", d.choice(((), shape, shape[-1:])))
    d.add("select", d.choice((f"jnp.where({p}, {x}, {y})", f"jnp.where({p}, {y}, 0.0) + {x}", f"{x} * {p}")))


MAKERS = {"unary": (6.0, unary), "binary": (7.0, binary), "whole": (1.0, whole), "mixed": (2.0, mixed),
          "select": (2.0, select)}  # fmt: skip
