"""Loops, branches, remat, custom derivatives and transformations, with random bodies."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz import operators
from tests.fuzz.draw import Draw, Rejected
from tests.fuzz.program import Type

_DEPTH = 3


def _fill(d: Draw, count: int) -> None:
    """A few statements in the innermost scope."""
    makers = [m for name, (_, m) in sorted(operators.OPERATORS.items()) if name not in ("linalg", "conv")]
    weights = [w for name, (w, _) in sorted(operators.OPERATORS.items()) if name not in ("linalg", "conv")]
    total = sum(weights)
    made = 0
    for _ in range(count * 6):
        maker: Callable[[Draw], object] = makers[int(d.rng.choice(len(makers), p=[w / total for w in weights]))]
        if made == count:
            return
        try:
            maker(d)
        except (Rejected, ValueError, ZeroDivisionError):  # the latter of dims of size 0
            continue
        made += 1


def _deep(d: Draw) -> None:
    if len(d.scopes) > _DEPTH:
        raise Rejected("deep")


def _into(d: Draw, name: str, shape: tuple[int, ...]) -> str:
    """The text of a float of ``shape`` that depends on the latest value of this scope and on ``name``."""
    made = [n for n in d.scopes[-1] if d.types[n].kind == "float"]
    last = made[-1] if made else name
    mine, n = d.shape_of(last), len(shape)
    fits = len(mine) <= n and all(a in (1, b) for a, b in zip(reversed(mine), reversed(shape), strict=False))
    return f"jnp.tanh({name} * 0.7 + {last if fits else f'jnp.mean({last})'} * 0.5)"


def scan(d: Draw) -> None:
    _deep(d)
    x = d.pick(test=lambda t: len(t.shape) >= 2)
    c = d.pick(test=lambda t: t.size <= 256)
    whole = d.chance(0.3)
    slice_type = Type("float", d.shape_of(x)[1:])

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(1, 3))
        made = [n for n in d.scopes[-1] if d.types[n].kind != "key"]
        ys = d.some(made) if d.chance(0.7) else []
        step = f"{names[-1]} + 1" if whole else None
        carry = _into(d, names[0], d.shape_of(c))
        new = f"({carry}, {step})" if whole else carry
        return f"{new}, ({''.join(f'{y}, ' for y in ys)})"

    # One parameter a leaf: the loop's own structure is put together in the text of the call.
    types = [d.types[c], slice_type, *([Type("int", ())] if whole else [])]
    body = d.body(types, fill)
    f = body.name
    options = d.choice(("", "", ", reverse=True", ", unroll=2"))
    if whole:
        call = f"jax.lax.scan(lambda c, x: {f}(c[0], x, c[1]), ({c}, jnp.int32(0)), {x}{options})"
    else:
        inner = f"jax.checkpoint({f})" if d.chance(0.2) else f
        call = f"jax.lax.scan({inner}, {c}, {x}{options})"
    d.add("scan", call, [body])


def fori(d: Draw) -> None:
    _deep(d)
    c = d.pick(test=lambda t: t.size <= 256)

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(1, 2))
        return _into(d, names[1], d.shape_of(c))

    body = d.body([Type("int", ()), d.types[c]], fill)
    d.add("fori", f"jax.lax.fori_loop(0, {d.integer(1, 4)}, {body.name}, {c})", [body])


def while_loop(d: Draw) -> None:
    _deep(d)
    c = d.pick(test=lambda t: t.size <= 256)
    bound = d.choice(("k < 3", "k < jnp.int32(2)", "(k < 4) & (steps(jnp.mean(c)) < 40)", "k < 0"))

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(1, 2))
        return f"{_into(d, names[0], d.shape_of(c))}, {names[1]} + 1"

    body = d.body([d.types[c], Type("int", ())], fill, closed=True)
    text = f"jax.lax.while_loop(lambda s: (lambda c, k: {bound})(*s), lambda s: {body.name}(*s), "
    d.add("while", text + f"(jax.lax.stop_gradient({c}), jnp.int32(0)))", [body])


def branch(d: Draw) -> None:
    _deep(d)
    x = d.pick(test=lambda t: t.size <= 512)
    shape = d.shape_of(x)

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(0, 2))
        return f"{_into(d, names[0], shape)}, jnp.sum({names[0]})"

    count = d.choice((2, 2, 3))
    bodies = [d.body([d.types[x]], fill) for _ in range(count)]
    names = ", ".join(b.name for b in bodies)
    if count == 2:
        y = d.pick("bool") if d.chance(0.5) else None
        p = f"jnp.any({y})" if y else f"steps(jnp.mean({d.pick()})) > 0"
        d.add("cond", f"jax.lax.cond({p}, {names}, {x})", bodies)
    else:
        d.add("switch", f"jax.lax.switch({d.pick('int')}.sum() % 4, [{names}], {x})", bodies)


def batched_branch(d: Draw) -> None:
    """A branch or a loop under vmap: each example decides."""
    _deep(d)
    x = d.pick(test=lambda t: len(t.shape) >= 1 and t.size <= 256)
    type = Type("float", d.shape_of(x)[1:])

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(0, 2))
        return _into(d, names[0], type.shape)

    loop = d.chance(0.5)
    bodies = [d.body([type], fill, closed=loop) for _ in range(1 if loop else 2)]
    if loop:
        text = (
            f"jax.vmap(lambda r: jax.lax.while_loop(lambda s: s[1] < 2 + (steps(jnp.mean(r)) > 0), "
            f"lambda s: ({bodies[0].name}(s[0]), s[1] + 1), (jax.lax.stop_gradient(r), 0))[0])({x})"
        )
    else:
        text = f"jax.vmap(lambda r: jax.lax.cond(steps(jnp.mean(r)) > 0, {bodies[0].name}, {bodies[1].name}, r))({x})"
    d.add("batched_branch", text, bodies)


def wrapped(d: Draw) -> None:
    """Remat, jit and custom derivatives around a body."""
    _deep(d)
    x = d.pick(test=lambda t: t.size <= 512)

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(1, 3))
        return _into(d, names[0], d.shape_of(x))

    body = d.body([d.types[x]], fill)
    f = body.name
    texts = (
        f"jax.checkpoint({f})({x})", f"jax.jit({f})({x})", f"jax.checkpoint({f}, prevent_cse=False)({x})",
        f"jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)({x})",
        f"jax.checkpoint({f}, policy=jax.checkpoint_policies.nothing_saveable)({x})",
        f"jax.named_call({f}, name='g')({x})",
        f"jax.linearize({f}, {x})[1]({x})", f"jax.jvp({f}, ({x},), ({x},))[1]", f"jax.vjp({f}, {x})[1]({x} * 0.5)[0]",
        f"jax.grad(lambda r: jnp.sum({f}(r)))({x})",
    )  # fmt: skip
    d.add("wrapped", d.choice(texts), [body])


def custom(d: Draw) -> None:
    """Functions with derivatives of their own."""
    x = d.pick(test=lambda t: t.size <= 512)
    texts = (
        "(lambda f: (f.defvjp(lambda r: (jnp.sin(r), r), lambda r, g: (g * 2 * jnp.cos(r),)), f)[1])"
        f"(jax.custom_vjp(lambda r: jnp.sin(r)))({x})",
        "(lambda f: (f.defjvp(lambda p, t: (jnp.sin(p[0]), 3 * t[0] * jnp.cos(p[0]))), f)[1])"
        f"(jax.custom_jvp(lambda r: jnp.sin(r)))({x})",
        f"jax.custom_gradient(lambda r: (jnp.sum(r ** 2) * 0.1, lambda g: g * r))({x})",
        f"jax.nn.relu({x} + 0.1)", f"jax.nn.logsumexp({x})",
    )  # fmt: skip
    d.add("custom", d.choice(texts))


def mapped(d: Draw) -> None:
    _deep(d)
    x = d.pick(test=lambda t: len(t.shape) >= 1 and t.size <= 512)
    shape = d.shape_of(x)
    axis = d.integer(0, len(shape) - 1)
    type = Type("float", (*shape[:axis], *shape[axis + 1 :]))
    kind = d.choice(("vmap", "vmap", "map", "grad"))
    if kind == "map":
        axis, type = 0, Type("float", shape[1:])

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(1, 3))
        return _into(d, names[0], type.shape)

    body = d.body([type], fill)
    if kind == "map":
        d.add("map", f"jax.lax.map({body.name}, {x})", [body])
    elif kind == "grad":
        d.add("grad", f"jax.vmap(jax.grad(lambda r: jnp.mean({body.name}(r))), {axis})({x})", [body])
    else:
        d.add("vmap", f"jax.vmap({body.name}, {axis}, {d.integer(0, len(type.shape))})({x})", [body])


def manual(d: Draw) -> None:
    """A program for each device of a mesh of its own."""
    _deep(d)
    x = d.pick(test=lambda t: len(t.shape) >= 1 and t.size <= 256 and t.shape[0] % 2 == 0)
    shape = d.shape_of(x)
    n = d.choice([k for k in (2, 4, 8) if shape[0] % k == 0])
    type = Type("float", (shape[0] // n, *shape[1:]))
    ring = [(k, (k + 1) % n) for k in range(n)]

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(0, 2))
        r = names[0]
        texts = (
            f"jax.lax.psum({r}, 'm')", f"jax.lax.pmean({r}, 'm')", f"jax.lax.ppermute({r}, 'm', {ring})",
            f"jax.lax.all_gather({r}, 'm').mean(0)", f"{r} * jax.lax.axis_index('m')",
            f"jax.lax.psum_scatter(jax.lax.all_gather({r}, 'm'), 'm') * 0.2",
            f"jax.lax.all_to_all(jnp.broadcast_to({r}, ({n}, *{type.shape})), 'm', 0, 0).sum(0)",
        )  # fmt: skip
        return f"{_into(d, r, type.shape)} + jnp.sin({d.choice(texts)})"

    body = d.body([type], fill)
    spec = "jax.sharding.PartitionSpec('m')"
    d.add(
        "manual",
        f"jax.shard_map({body.name}, mesh=user_mesh({n}), in_specs={spec}, out_specs={spec}, check_vma=False)({x})",
        [body],
    )


MAKERS = {"scan": (2.5, scan), "fori": (1.0, fori), "while": (0.7, while_loop), "branch": (1.2, branch),
          "batched_branch": (0.7, batched_branch), "wrapped": (1.5, wrapped), "custom": (0.8, custom),
          "mapped": (1.5, mapped), "manual": (0.4, manual)}  # fmt: skip
