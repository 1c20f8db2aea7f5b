"""Products, convolutions, Fourier transforms and linear algebra."""

from __future__ import annotations

import math

from tests.fuzz.draw import SIZES, Draw, Rejected


def einsum(d: Draw) -> None:
    x = d.pick(test=lambda t: 1 <= len(t.shape) <= 4)
    letters = "abcd"[: len(d.shape_of(x))]
    sizes = dict(zip(letters, d.shape_of(x), strict=True))
    shared = d.some(letters)
    free = list("efg"[: d.integer(0, 2)])
    sizes.update({k: d.choice(SIZES) for k in free})
    right = [str(k) for k in d.rng.permutation([*shared, *free])]
    kept = [k for k in (*letters, *free) if k not in shared or d.chance(0.4)]
    out = [str(k) for k in d.rng.permutation(kept)] if d.chance(0.5) else kept
    summed = math.prod(sizes[k] for k in shared if k not in kept)
    same = [n for n in d.visible() if d.types[n].kind == "float" and d.shape_of(n) == tuple(sizes[k] for k in right)]
    y = d.choice(same) if same and d.chance(0.5) else d.input("float", [sizes[k] for k in right])
    pair = [(letters, x), ("".join(right), y)]
    if d.chance(0.5):
        pair.reverse()
    scale = "" if summed <= 2 else f" * {round(summed**-0.5, 3)}"
    d.add("einsum", f"jnp.einsum('{pair[0][0]},{pair[1][0]}->{''.join(out)}', {pair[0][1]}, {pair[1][1]}){scale}")


def matmul(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    k, n = d.shape_of(x)[-1], d.choice(SIZES)
    if d.chance(0.3) and len(d.shape_of(x)) >= 2:
        d.add("matmul", f"{x} @ jnp.swapaxes({x}, -1, -2) * {round(k**-0.5, 3)}")
    else:
        d.add("matmul", f"{x} @ {d.input('float', (k, n))} * {round(k**-0.5, 3)}")


def whole_product(d: Draw) -> None:
    i = d.pick("int", test=lambda t: len(t.shape) >= 1)
    j = d.input("int", (d.shape_of(i)[-1], d.choice((1, 3, 8))))
    d.add("whole_product", f"({i} % 8) @ {j}")


def conv(d: Draw) -> None:
    dims = d.choice((1, 1, 2))
    groups = d.choice((1, 1, 1, 2, 4))
    depthwise = d.chance(0.25)
    batch = d.choice((1, 2, 4, 8))
    features = d.choice((2, 4, 8)) if groups == 1 else groups * d.choice((1, 2))
    if depthwise:
        groups = features
    space = tuple(d.choice((3, 4, 5, 8)) for _ in range(dims))
    out = groups * d.choice((1, 2, 4))
    window = tuple(min(d.choice((1, 2, 3)), s) for s in space)
    letters = "HW"[:dims]
    channels_last = d.chance(0.6)
    shape = (batch, *space, features) if channels_last else (batch, features, *space)
    spec = (
        (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        if channels_last
        else (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    )
    kernel = (*window, features // groups, out) if channels_last else (out, features // groups, *window)
    same = [n for n in d.visible() if d.types[n].kind == "float" and d.shape_of(n) == shape]
    flat = [n for n in d.visible() if d.types[n].kind == "float" and d.types[n].size == math.prod(shape)]
    x = d.choice(same) if same else f"{d.choice(flat)}.reshape({shape})" if flat else d.input("float", shape)
    w = d.input("float", kernel)
    one = d.choice((1, 1, 2))
    options = [
        f"window_strides={(one,) * dims}",
        f"padding={d.choice(('SAME', 'VALID'))!r}" if d.chance(0.6) else f"padding={((1, 2),) * dims}",
        f"dimension_numbers={spec}",
        f"feature_group_count={groups}",
    ]
    if d.chance(0.2):
        options.append(f"rhs_dilation={(2,) * dims}")
    if d.chance(0.15) and "SAME" not in options[1] and "VALID" not in options[1]:
        options.append(f"lhs_dilation={(2,) * dims}")
    d.add("conv", f"jax.lax.conv_general_dilated({x}, {w}, {', '.join(options)}) * 0.4")


def pool(d: Draw) -> None:
    x = d.pick(test=lambda t: 1 <= len(t.shape) <= 3)
    rank = len(d.shape_of(x))
    window = tuple(d.choice((1, 1, 2, 3)) for _ in range(rank))
    strides = tuple(d.choice((1, w)) for w in window)
    padding = d.choice(("VALID", "SAME"))
    kind = d.choice((("-jnp.inf", "max"), ("jnp.inf", "min"), ("0.0", "add")))
    d.add("pool", f"jax.lax.reduce_window({x}, {kind[0]}, jax.lax.{kind[1]}, {window}, {strides}, {padding!r})")


def linalg(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 2 and t.shape[-1] <= 6 and t.shape[-2] <= 6)
    n = d.shape_of(x)[-2]
    square = f"({x} @ jnp.swapaxes({x}, -1, -2) + {n + 1} * jnp.eye({n}))"
    texts = (
        f"jnp.linalg.inv({square})", f"jnp.linalg.cholesky({square})", f"jnp.linalg.slogdet({square})[1]",
        f"jnp.linalg.solve({square}, {x})", f"jnp.linalg.eigvalsh({square} + jnp.diag(jnp.arange({n}) * 9.0))",
        f"jnp.linalg.norm({x} + 0.1)", f"jax.scipy.linalg.solve_triangular({square}, {x}, lower=True)",
        f"jnp.linalg.qr({square})[1] * jnp.sign(jnp.linalg.qr({square})[1])", f"jnp.linalg.det({square}) * 1e-3",
        f"jnp.linalg.matrix_power({x} @ jnp.swapaxes({x}, -1, -2) * 0.1, 3)",
        f"jnp.trace({square}, axis1=-1, axis2=-2)",
    )  # fmt: skip
    d.add("linalg", d.choice(texts))


def matrices(d: Draw) -> None:
    """Factorizations and solves of a matrix of each example, by leading dims or under vmap."""
    x = d.pick(test=lambda t: 1 <= len(t.shape) <= 3 and 2 <= t.shape[-1] <= 6 and t.size <= 128)
    rank, n = len(d.shape_of(x)), d.shape_of(x)[-1]
    texts = (
        "jnp.linalg.solve({m}, r[..., None])[..., 0]", "jnp.linalg.inv({m})", "jnp.linalg.cholesky({m})",
        "jnp.linalg.slogdet({m})[1]", "jnp.linalg.eigvalsh({m})", "jnp.abs(jnp.linalg.eigh({m})[1])",
        "jnp.abs(jnp.linalg.qr({m})[1])", "jnp.linalg.svd({m}, compute_uv=False)", "jax.lax.linalg.lu({m})[0]",
        "jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({m}), True), r[..., None])",
        "jax.scipy.linalg.solve_triangular({m}, r[..., None], lower=True)",
        "jax.lax.linalg.triangular_solve({m}, r[..., None, :], lower=True)",
        "jax.scipy.linalg.expm({m} * 0.1)", "jnp.linalg.pinv({m})",
    )  # fmt: skip
    matrix = f"(r[..., :, None] * r[..., None, :] * 0.3 + jnp.diag({n} + 9.0 * jnp.arange({n})))"
    function = f"lambda r: {d.choice(texts).format(m=matrix)}"
    for _ in range(d.integer(0, rank - 1)):
        function = f"jax.vmap({function})"
    d.add("matrices", f"({function})({x})")


def fourier(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    texts = (f"jnp.fft.fft({x}).real * 0.5", f"jnp.fft.rfft({x}).imag * 0.5", f"jnp.abs(jnp.fft.ifft({x}) + 2)",
             f"jnp.fft.irfft(jnp.fft.rfft({x}) * 0.5)", f"jnp.fft.fft({x}, axis=0).real * 0.5")  # fmt: skip
    d.add("fourier", d.choice(texts))


def outer(d: Draw) -> None:
    x = d.pick(rank=1)
    y = d.pick(rank=1)
    if d.types[x].size * d.types[y].size > 512:
        raise Rejected("too large")
    d.add("outer", d.choice((f"jnp.outer({x}, {y})", f"jnp.kron({x}, {y})", f"jnp.convolve({x}, {y}) * 0.3",
                             f"jnp.vander({x}, 3) * 0.2", f"jnp.cov({x}) + 0 * {y}")))  # fmt: skip


MAKERS = {"einsum": (5.0, einsum), "matmul": (5.0, matmul), "whole_product": (0.3, whole_product), "conv": (2.5, conv),
          "pool": (1.0, pool), "linalg": (0.8, linalg), "matrices": (1.0, matrices),
          "fourier": (0.8, fourier), "outer": (0.5, outer)}  # fmt: skip
