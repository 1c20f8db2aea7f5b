"""``python -m benchmarks.collective_matmul TARGET``: two layers compiled with and without products in blocks."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autopar
from autopar.lower.aot import Verification, parse_target

_DEVICES = 8


def step(x: jax.Array, w1: jax.Array, w2: jax.Array) -> Any:
    """Two layers with all gradients."""

    def loss(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square((jax.nn.gelu(x @ w1) @ w2).astype(jnp.float32)))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w1, w2)


def compiled(target: str, how: str, tokens: int = 8192, width: int = 4096, hidden: int = 16384) -> Verification:
    """The step as the compiler of a target makes it.

    Args:
        target: eight devices, as ``tpu:v5e:2x4``.
        how: ``collective_matmul`` of `autopar.parallelize`.
        tokens: split over the devices.
        width: of a token.
        hidden: width between the layers.
    """
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, tokens, width), (width, hidden), (hidden, width))]
    parallel = autopar.parallelize(
        step,
        cluster=parse_target(target).cluster(),
        num_stages=1,
        num_microbatches=1,
        mesh_shape=(_DEVICES,),
        remat="none",
        collective_matmul=how,
        constraints={"x": P(None, "m", None), "w1": P(None, "m"), "w2": P("m", None)},
        mesh_axes={"m": _DEVICES},
    )
    found = autopar.verify(parallel.plan(*args), parallel, *args, target=target)
    assert isinstance(found, Verification)
    return found


def products_between(hlo: str) -> list[int]:
    """For each collective-permute of a compiled program the products between its start and its end."""
    entry = hlo[hlo.index("ENTRY") :].splitlines()
    starts, counts, products = dict[str, int](), list[int](), 0
    for line in entry:
        named = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(", line)
        if named is None:
            continue
        if named[2] == "collective-permute-start":
            starts[named[1]] = products
        elif named[2] == "collective-permute-done":
            operand = line.partition("collective-permute-done(")[2].partition(")")[0].rpartition("%")[2]
            counts.append(products - starts[operand])
        elif named[2] in ("fusion", "custom-call", "dot", "convolution") and "dot_general" in line:
            products += 1
    return counts


def main(target: str) -> None:
    """Prints both programs."""
    for how in ("none", "auto"):
        v = compiled(target, how)
        s = v.compiled_step_s
        print(f"{target} {how:5}: predicted {1e3 * v.predicted_step_s:.3g} ms, compiled {1e3 * s.total_s:.3g} ms "
              f"(products {1e3 * s.products_s:.3g}, memory {1e3 * s.memory_s:.3g}, collectives "
              f"{1e3 * s.collectives_s:.3g}, exposed {1e3 * s.exposed_s:.3g}), products from start to end of "
              f"each message: {products_between(v.hlo)}")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
