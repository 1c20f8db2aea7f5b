"""What the text of a generated program calls, and the arguments that it is called with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tests.fuzz.precision import noise_of


def argument(kind: str, shape: tuple[int, ...], seed: int, dtype: str = "float64") -> Any:
    """An input: ``float`` of unit variance, ``int`` from 0 to 7, ``bool``, ``key`` (typed) or ``rawkey``.

    Args:
        kind: of these.
        shape: of the array.
        seed: of its values.
        dtype: of floats.
    """
    rng = np.random.default_rng((seed, *shape))
    match kind:
        case "float":
            values = rng.standard_normal(shape)
            return jnp.asarray(values + 0.5j * rng.standard_normal(shape) if "complex" in dtype else values, dtype)
        case "int":
            return jnp.asarray(rng.integers(0, 8, shape), jnp.int32)
        case "bool":
            return jnp.asarray(rng.random(shape) < 0.5)
        case "key":
            return jax.random.key(seed) if shape == () else jax.random.split(jax.random.key(seed), shape)
        case "rawkey":
            return jax.random.key_data(jax.random.key(seed))
    raise ValueError(kind)


def steps(x: Any) -> Any:
    """Whole numbers from floats, with the jumps where no value of a test lies: rounding cannot change them.

    Of half precision all are the same: there are no gaps between values that rounding does not bridge.
    """
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return jnp.zeros_like(x) + 3
    return jnp.round(x * 8 + 0.3137)


def is_floating(x: Any) -> bool:
    """Whether an array has floats."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def total(outputs: Any) -> Any:
    """A scalar that depends on every element of every float."""
    parts = [jnp.mean(jnp.sin(x)).real for x in jax.tree.leaves(outputs) if is_floating(x) and x.size]
    return sum(parts[1:], parts[0]) if parts else jnp.zeros(())


def user_mesh(size: int) -> jax.sharding.Mesh:
    """A mesh of the user's own: the first devices, axis ``m``."""
    return jax.sharding.Mesh(np.array(jax.devices()[:size]), ("m",))


def sgd(params: Any, grads: Any) -> Any:
    """A step down the gradient."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def adam(params: Any, grads: Any, moments: Any) -> tuple[Any, Any]:
    """A step of Adam with clipping by global norm; ``moments`` are (first, second)."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / (1 + norm), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v * v + 0.01 * g * g, moments[1], grads)
    new = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-2), params, first, second)
    return new, (first, second)


def noisy(x: Any, dtype: str = "float64", seed: int = 0) -> Any:
    """Floats changed in their last digits, each element by itself.

    Args:
        x: a value of a program.
        dtype: that the program computes in.
        seed: of the noise.
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    noise = np.random.default_rng((x.size, seed)).choice([-1.0, 1.0], x.shape)
    return (x * (1 + noise_of(x.dtype, dtype) * noise)).astype(x.dtype)


def table(size: int) -> Any:
    """A numpy array that helpers close over."""
    return np.linspace(0.5, 1.5, size)


def recorded(f: Any, x: Any, trips: int) -> Any:
    """``x`` after some trips of ``f``, plus the means that they wrote to a reference."""
    ref = jax.new_ref(jnp.zeros(3, x.dtype) + 0 * jnp.mean(x))

    def body(c: Any, i: Any) -> tuple[Any, None]:
        ref[i] = jnp.mean(c)
        return f(c), None

    after, _ = jax.lax.scan(body, x, jnp.arange(trips))
    return after + jnp.sum(jax.freeze(ref))


def added_up(f: Any, x: Any, trips: int) -> Any:
    """The sum of ``f`` of multiples of ``x``, in a reference."""
    ref = jax.new_ref(0 * x)
    for k in range(trips):
        ref[...] += f(x * (k + 1))
    return ref[...]


def under(name: str, value: Any, f: Any, x: Any) -> Any:
    """``f(x)`` under a setting of jax."""
    with getattr(jax, name)(value):
        return f(x)


def called(kind: str, x: Any) -> Any:
    """``x`` and a part of its tangent hyperbolic, which Python computes.

    Args:
        kind: "pure" or "io", with numpy; "jax", by a jitted function inside of a pure callback; "debug", whose results
            nothing reads.
        x: floats.
    """
    held = jax.lax.stop_gradient(x)
    if kind == "debug":
        jax.debug.callback(np.tanh, held)
        return x
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def tanh(v: Any) -> Any:
        return jax.jit(jnp.tanh)(np.asarray(v)) if kind == "jax" else np.tanh(np.asarray(v))

    if kind == "io":
        return x + 0.3 * jax.lax.stop_gradient(io_callback(tanh, shape, held))
    return x + 0.3 * jax.lax.stop_gradient(jax.pure_callback(tanh, shape, held, vmap_method="sequential"))


#: What the text of a program may name.
NAMES = (
    "total", "sgd", "adam", "noisy", "steps", "is_floating", "user_mesh", "table", "recorded", "added_up", "under",
    "called",
)  # fmt: skip
__all__ = list(NAMES)
