"""Ten train steps with sharding constraints inside, in the style of public code: each returns ``(step, args)``.

Flax's and optax's are with the packages; Equinox', Haiku's, T5X', EasyLM's and MaxText's repeat the few lines of theirs
by which they constrain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Step = tuple[Callable[..., Any], tuple[Any, ...]]
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
WIDE, BATCH, SEQ, VOCAB = 32, 16, 8, 64


def stay(x: Any, *spec: Any) -> Any:
    """The constraint as most code writes it."""
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * 0.2


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def linen_logical_axes() -> Step:
    """`nn.with_logical_constraint` under axis rules, and a TrainState: Flax's guide, MaxText's layers."""
    rules = (("batch", "data"), ("mlp", "model"), ("embed", None))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.with_logical_constraint(x, ("batch", "embed"), mesh=MESH, rules=rules)
            h = nn.with_logical_constraint(jax.nn.gelu(nn.Dense(64)(x)), ("batch", "mlp"), mesh=MESH, rules=rules)
            return nn.Dense(WIDE)(h)

    network, adam = Network(), optax.adam(1e-3)
    x = draw(0, BATCH, WIDE)
    params = network.init(jax.random.key(1), x)

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((network.apply(p, x) - x) ** 2))(state["params"])
        updates, moments = adam.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": moments}, loss

    return step, ({"params": params, "opt": adam.init(params)}, x)


def nnx_module() -> Step:
    """A module of nnx that constrains its activations, trained by `nnx.value_and_grad` over its state."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(WIDE, 64, rngs=rngs), nnx.Linear(64, WIDE, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(stay(jax.nn.relu(self.up(x)), "data", "model"))

    graph, params = nnx.split(Block(nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params)(x) - x) ** 2)

    return sgd(loss), (params, draw(1, BATCH, WIDE))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A layer as Equinox has it: a pytree that is called."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x + self.bias


def equinox_filter_shard() -> Step:
    """`eqx.filter_shard` of model and batch inside of the step, layers under `vmap`: Equinox' parallelism page."""

    def filter_shard(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda a: lax.with_sharding_constraint(a, sharding), tree)

    def loss(model: list[Linear], x: jax.Array) -> jax.Array:
        def one(v: jax.Array) -> jax.Array:
            for layer in model[:-1]:
                v = jnp.tanh(layer(v))
            return model[-1](v)

        return jnp.mean((jax.vmap(one)(x) - x) ** 2)

    def step(model: list[Linear], x: jax.Array) -> Any:
        model = filter_shard(model, NamedSharding(MESH, P()))
        x = filter_shard(x, NamedSharding(MESH, P("data")))
        value, grads = jax.value_and_grad(loss)(model, x)
        model = jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)
        return filter_shard(model, NamedSharding(MESH, P())), value

    layers = [Linear(draw(n, 64, WIDE) if n == 0 else draw(n, WIDE, 64), jnp.zeros(64 - 32 * n)) for n in range(2)]
    return step, (layers, draw(2, BATCH, WIDE))


def haiku_functions() -> Step:
    """Parameters by module name, functions of them: what `hk.transform` gives, with constraints of a layer's output."""

    def linear(params: Any, name: str, x: jax.Array) -> jax.Array:
        return x @ params[name]["w"] + params[name]["b"]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = stay(jax.nn.silu(linear(params, "mlp/~/linear_0", x)), ("data", "model"))
        logits = linear(params, "mlp/~/linear_1", h)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = {
        "mlp/~/linear_0": {"w": draw(0, WIDE, 64), "b": jnp.zeros(64)},
        "mlp/~/linear_1": {"w": draw(1, 64, 10), "b": jnp.zeros(10)},
    }
    return sgd(loss), (params, draw(2, BATCH, WIDE), jnp.arange(BATCH) % 10)


def optax_sharded_gradients() -> Step:
    """Gradients and moments constrained to parts, parameters whole: ZeRO as it is written with optax."""
    adamw = optax.adamw(1e-3)

    def parts(tree: Any) -> Any:
        return jax.tree.map(lambda a: stay(a, ("data", "model")) if a.ndim > 1 else a, tree)

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, moments = adamw.update(parts(grads), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": parts(moments)}, value

    params = {"up": draw(0, WIDE, 64), "down": draw(1, 64, WIDE)}
    return step, ({"params": params, "opt": adamw.init(params)}, draw(2, BATCH, WIDE))


def t5x_partitioner() -> Step:
    """T5X' `with_sharding_constraint(x, logical axes)`, which looks rules up, in attention of T5's form."""
    rules = {"batch": "data", "heads": "model", "length": None, "kv": None, "embed": None}

    def constrain(x: jax.Array, *names: str) -> jax.Array:
        return stay(x, *(rules[n] for n in names))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            constrain(jnp.einsum("ble,ehd->blhd", x, p[n]), "batch", "length", "heads", "kv") for n in ("q", "k", "v")
        )
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        y = constrain(jnp.einsum("bqhd,hde->bqe", y, p["o"]), "batch", "length", "embed")
        return jnp.mean((x + y) ** 2)

    params = {**{n: draw(k, WIDE, 4, 8) for k, n in enumerate("qkv")}, "o": draw(3, 4, 8, WIDE)}
    return sgd(loss), (params, draw(4, BATCH, SEQ, WIDE))


def maxtext_scan() -> Step:
    """A scan over stacked layers with `jax.checkpoint`, constrained at both ends of a layer: MaxText's decoder."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("out"))
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = stay(x, "data", None, None)
        h = stay(jax.nn.silu(x @ p["wi_0"]) * (x @ p["wi_1"]), "data", None, "model")
        return stay(x + checkpoint_name(h @ p["wo"], "out"), "data", None, None), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(layer, x, p)
        return jnp.mean((y - 1) ** 2)

    params = {"wi_0": draw(0, 2, WIDE, 64), "wi_1": draw(1, 2, WIDE, 64), "wo": draw(2, 2, 64, WIDE)}
    return sgd(loss), (params, draw(3, BATCH, SEQ, WIDE))


def easylm_names_only() -> Step:
    """Bare specs that the mesh around the call gives a meaning to, as EasyLM and big_vision write them."""

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = lax.with_sharding_constraint(p["wte"][tokens], P("data", None, None))
        h = lax.with_sharding_constraint(jax.nn.gelu(x @ p["w1"]), P("data", None, "model"))
        logits = lax.with_sharding_constraint((x + h @ p["w2"]) @ p["wte"].T, P("data", None, "model"))
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    params = {"wte": draw(0, VOCAB, WIDE), "w1": draw(1, WIDE, 64), "w2": draw(2, 64, WIDE)}
    return sgd(loss), (params, jnp.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % VOCAB)


def accumulated() -> Step:
    """Gradients added up over a scan of chunks and constrained in every trip, as levanter and MaxText do."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(p: Any, chunk: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(chunk @ p["up"]) @ p["down"]) ** 2)

        def add(total: Any, chunk: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, stay(chunk, "data"))
            return jax.tree.map(lambda t, g: stay(t + g, "model"), total, grads), value

        total, values = lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(4, -1, WIDE))
        return jax.tree.map(lambda w, g: w - 0.1 * g / 4, params, total), values.mean()

    return step, ({"up": draw(0, WIDE, 64), "down": draw(1, 64, WIDE)}, draw(2, BATCH, WIDE))


def mixture_of_experts() -> Step:
    """Tokens dispatched to experts that lie on their own axis, by an inner jit with `out_shardings`: GShard's form."""

    @partial(jax.jit, out_shardings=NamedSharding(MESH, P("model", None, None)))
    def to_experts(dispatch: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("tec,td->ecd", dispatch, x)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])
        place = jnp.arange(x.shape[0]) % 8
        dispatch = jax.nn.one_hot(jnp.argmax(gates, -1), 4)[:, :, None] * jax.nn.one_hot(place, 8)[:, None]
        given = to_experts(dispatch, x)
        made = stay(
            jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", given, p["up"])), p["down"]), "model"
        )
        y = stay(jnp.einsum("tec,ecd->td", dispatch * gates[:, :, None], made), "data", None)
        return jnp.mean((x + y) ** 2)

    params = {"router": draw(0, WIDE, 4), "up": draw(1, 4, WIDE, 64), "down": draw(2, 4, 64, WIDE)}
    return sgd(loss), (params, draw(3, BATCH, WIDE))


STEPS: tuple[Callable[[], Step], ...] = (
    linen_logical_axes,
    nnx_module,
    equinox_filter_shard,
    haiku_functions,
    optax_sharded_gradients,
    t5x_partitioner,
    maxtext_scan,
    easylm_names_only,
    accumulated,
    mixture_of_experts,
)
