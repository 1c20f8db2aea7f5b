"""Small models whose layers lie in stacks that they scan over: of text, of images, of pairs of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples import gpt, llama

WIDTH, HEADS = 16, 2
TEXT = {"hidden": WIDTH, "heads": HEADS, "vocab": 16, "seq": 32, "batch": 16, "dtype": "float64", "scan": True}


def build_gpt(layers: int) -> tuple[Any, Any]:
    """A GPT."""
    return gpt.build("tiny", layers=layers, clip=None, **TEXT)


def build_llama(layers: int) -> tuple[Any, Any]:
    """A LLaMA whose layers it does not checkpoint."""
    sizes = {name: value for name, value in TEXT.items() if name != "scan"}
    return llama.build("tiny", layers=layers, kv_heads=1, remat=False, **sizes)


def _normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _attended(queries: jax.Array, others: jax.Array, w: Any) -> jax.Array:
    """Attention of examples [b, s, WIDTH] to ``others``, without a mask."""
    q, k, v = (
        jnp.einsum("bsd,dhe->bhse", x, w[n]) for x, n in ((queries, "query"), (others, "key"), (others, "value"))
    )
    scores = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k) / k.shape[-1] ** 0.5)
    return jnp.einsum("bhse,hed->bsd", jnp.einsum("bhst,bhte->bhse", scores, v), w["out"])


def _block(x: jax.Array, w: Any) -> jax.Array:
    """A block of an encoder."""
    x = x + _attended(_normed(x), _normed(x), w)
    return x + jax.nn.gelu(_normed(x) @ w["up"]) @ w["down"]


def _drawn(layers: int) -> Callable[..., jax.Array]:
    """What draws a stack of parameters of a shape from a number."""

    def drawn(number: int, *shape: int) -> jax.Array:
        return 0.2 * jax.random.normal(jax.random.key(number), (layers, *shape), jnp.float64)

    return drawn


def _blocks(layers: int, number: int, *, cross: bool = False) -> dict[str, jax.Array]:
    """Parameters of blocks of transformers."""
    drawn, each = _drawn(layers), WIDTH // HEADS
    heads = {n: (WIDTH, HEADS, each) for n in ("query", "key", "value")} | {"out": (HEADS, each, WIDTH)}
    shapes = heads | {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {f"cross_{n}": s for n, s in heads.items()} if cross else {}
    return {n: drawn(number + i, *s) for i, (n, s) in enumerate(shapes.items())}


def _step(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """A step of gradient descent with momentum."""

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, momentum = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum), value

    return step


def _arguments(params: Any, *batch: tuple[int, ...]) -> tuple[Any, Any]:
    examples = tuple(jax.random.normal(jax.random.key(90 + n), s, jnp.float64) for n, s in enumerate(batch))
    return (params, jax.tree.map(jnp.zeros_like, params)), examples


def build_vit(layers: int) -> tuple[Any, Any]:
    """A vision transformer: 16 patches of each image."""

    def loss(p: Any, batch: Any) -> jax.Array:
        images, wanted = batch
        patches = images.reshape(images.shape[0], 4, 4, 4, 4, 3).swapaxes(2, 3).reshape(images.shape[0], 16, 48)
        x, _ = lax.scan(lambda x, w: (_block(x, w), None), patches @ p["patches"] + p["positions"], p["layers"])
        return jnp.mean((_normed(x).mean(1) @ p["head"] - wanted) ** 2)

    one = _drawn(1)
    params = {"layers": _blocks(layers, 0), "patches": one(50, 48, WIDTH)[0], "positions": one(51, 16, WIDTH)[0]}
    return _step(loss), _arguments({**params, "head": one(52, WIDTH, 4)[0]}, (16, 16, 16, 3), (16, 4))


def build_encoder_decoder(layers: int) -> tuple[Any, Any]:
    """Half of the layers encode a sequence, which all others attend to."""

    def decoded(encoded: jax.Array, x: jax.Array, w: Any) -> jax.Array:
        x = x + _attended(_normed(x), encoded, {n: w[f"cross_{n}"] for n in ("query", "key", "value", "out")})
        return _block(x, w)

    def loss(p: Any, batch: Any) -> jax.Array:
        source, target = batch
        x, _ = lax.scan(lambda x, w: (_block(x, w), None), source, p["encoder"])
        encoded = _normed(x)
        y, _ = lax.scan(lambda y, w: (decoded(encoded, y, w), None), target, p["decoder"])
        return jnp.mean((_normed(y) @ p["head"] - target) ** 2)

    halves = {"encoder": _blocks(layers // 2, 0), "decoder": _blocks(layers // 2, 20, cross=True)}
    params = {**halves, "head": _drawn(1)(50, WIDTH, WIDTH)[0]}
    return _step(loss), _arguments(params, (8, 16, WIDTH), (8, 16, WIDTH))


def build_unet(layers: int) -> tuple[Any, Any]:
    """Blocks of convolutions at two resolutions, down and up again, with what skips the lower one."""
    features, each = 4, layers // 2

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + convolved(jax.nn.gelu(convolved(_normed(x), w["first"])), w["second"]), None

    def loss(p: Any, batch: Any) -> jax.Array:
        images, wanted = batch
        x, _ = lax.scan(block, images, p["down"])
        b, h, w, c = x.shape
        low = x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4)) @ p["wider"]
        low = jnp.repeat(jnp.repeat(low @ p["narrower"], 2, 1), 2, 2)
        y, _ = lax.scan(block, low + x, p["up"])
        return jnp.mean((y - wanted) ** 2)

    drawn, one = _drawn(each), _drawn(1)
    shape = (3, 3, features, features)
    stacks = {n: {"first": drawn(k, *shape), "second": drawn(k + 1, *shape)} for k, n in ((0, "down"), (2, "up"))}
    ends = {"wider": one(50, features, 2 * features)[0], "narrower": one(51, 2 * features, features)[0]}
    return _step(loss), _arguments({**stacks, **ends}, (8, 8, 8, features), (8, 8, 8, features))


#: By name what builds a model of so many layers: a step, and its arguments.
MODELS: Mapping[str, Callable[[int], tuple[Any, Any]]] = MappingProxyType(
    {
        "gpt": build_gpt,
        "llama": build_llama,
        "vit": build_vit,
        "encoder-decoder": build_encoder_decoder,
        "unet": build_unet,
    }
)
