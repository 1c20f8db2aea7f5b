"""Seconds of single kernels on one device: products, memory-bound operators, attention, launches, the host link."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Row = dict[str, Any]

#: Seconds that one timing takes at least, and how many timings give a median.
_LEAST_S = 0.02
_REPEATS = 7
_WIDTHS = (64, 128, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 12288, 16384)


def seconds(run: Callable[[], Any]) -> float:
    """Median seconds of one run of ``run``; runs are started one after the other and waited for together."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    runs = max(1, min(1000, round(_LEAST_S / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(runs):
            last = run()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / runs)
    return statistics.median(times)


def products(seed: int, count: int) -> Iterator[Row]:
    """Products of random matrices of drawn sizes: batch, rows, depth, columns, dtype."""
    draw = random.Random(seed)
    named = [(1, n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
    drawn = []
    while len(drawn) < count:
        batch = draw.choice((1, 1, 1, 1, 8, 64, 192))
        m, k, n = (draw.choice(_WIDTHS) for _ in range(3))
        if 1e8 <= 2.0 * batch * m * k * n <= 6e12 and batch * (m * k + k * n + m * n) <= 4e9:
            drawn.append((batch, m, k, n))
    for dtype in (jnp.bfloat16, jnp.float32):
        for batch, m, k, n in named + (drawn if dtype == jnp.bfloat16 else drawn[::4]):
            key = jax.random.key(batch + m + k + n)
            x = jax.random.normal(key, (batch, m, k), dtype)
            y = jax.random.normal(key, (batch, k, n), dtype)
            compiled = jax.jit(jnp.matmul).lower(x, y).compile()
            took = seconds(lambda c=compiled, x=x, y=y: c(x, y))
            name = jnp.dtype(dtype).name
            yield {"what": "product", "dtype": name, "batch": batch, "m": m, "k": k, "n": n, "seconds": took}
            del x, y


def memory_bound() -> Iterator[Row]:
    """Elementwise operators, norms, softmax, a fused Adam update, gathers, with the least bytes that they move."""
    for rows in (1 << 8, 1 << 11, 1 << 14, 1 << 17):
        width = 2048
        x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(1), (rows, width), jnp.float32)
        cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
            "add": (lambda a, b: a + b, (x, x), 3 * x.nbytes),
            "gelu": (jax.nn.gelu, (x,), 2 * x.nbytes),
            "layer norm": (_norm, (x,), 2 * x.nbytes),
            "softmax": (lambda a: jax.nn.softmax(a.astype(jnp.float32)).astype(a.dtype), (x,), 2 * x.nbytes),
            "sum of rows": (lambda a: jnp.sum(a, axis=0), (w,), w.nbytes),
            "transpose": (lambda a: a.T + 0, (x,), 2 * x.nbytes),
            "adam": (_adam, (w, w, w, w), 7 * w.nbytes),
            "random bits": (lambda a: jax.random.bits(jax.random.key(a[0, 0].astype(int)), a.shape), (w,), w.nbytes),
            "gather of rows": (lambda a, i: a[i], (x, jnp.arange(rows)[::-1]), 2 * x.nbytes),
        }
        for name, (fn, args, moved_bytes) in cases.items():
            compiled = jax.jit(fn).lower(*args).compile()
            took = seconds(lambda c=compiled, args=args: c(*args))
            yield {"what": "memory", "name": name, "bytes": moved_bytes, "seconds": took}


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _adam(w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def attention() -> Iterator[Row]:
    """Causal attention, forward and with gradients, as written plainly (XLA) and by the device's own kernel."""
    for batch, seq, heads, width in ((8, 1024, 16, 64), (4, 2048, 16, 128), (1, 8192, 16, 128), (32, 512, 12, 64)):
        q = jax.random.normal(jax.random.key(0), (batch, seq, heads, width), jnp.bfloat16)
        for kernel in ("xla", "cudnn"):

            def forward(q: jax.Array, kernel: str = kernel) -> jax.Array:
                return jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation=kernel)

            def loss(q: jax.Array, forward: Callable[[jax.Array], jax.Array] = forward) -> jax.Array:
                return forward(q).astype(jnp.float32).sum()

            for phase, fn in (("forward", forward), ("forward and backward", jax.grad(loss))):
                row: Row = {"what": "attention", "kernel": kernel, "phase": phase, "batch": batch, "seq": seq}
                row |= {"heads": heads, "width": width}
                try:
                    compiled = jax.jit(fn).lower(q).compile()
                    row["seconds"] = seconds(lambda c=compiled, q=q: c(q))
                except Exception as error:
                    row["error"] = str(error).splitlines()[0][:200]
                yield row


def launches() -> Iterator[Row]:
    """Chains of tiny products in one program, calls of a tiny program, and copies to and from the host."""
    x = jnp.ones((4, 4))
    for length in (1, 8, 32, 128, 512):

        def chain(x: jax.Array, length: int = length) -> jax.Array:
            for _ in range(length):
                x = x @ x
            return x

        compiled = jax.jit(chain).lower(x).compile()
        yield {"what": "chain", "length": length, "seconds": seconds(lambda c=compiled: c(x))}
    device = jax.devices()[0]
    for size in (1 << 20, 1 << 26, 1 << 29):
        host = np.random.default_rng(0).random(size // 4, np.float32)
        on_device = jax.device_put(host, device)
        yield {"what": "to device", "bytes": size, "seconds": seconds(lambda h=host: jax.device_put(h, device))}
        pinned = jax.device_put(on_device, on_device.sharding.with_memory_kind("pinned_host"))
        up = jax.jit(lambda a: a, out_shardings=on_device.sharding)
        yield {"what": "pinned to device", "bytes": size, "seconds": seconds(lambda p=pinned, up=up: up(p))}
        down = jax.jit(lambda a: a, out_shardings=pinned.sharding)
        yield {"what": "device to pinned", "bytes": size, "seconds": seconds(lambda d=on_device, down=down: down(d))}
