"""Modules and filtered transformations of equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.public.data import integers, normal


def fitted(model, loss, *batch, optimizer=None):
    """A step on a module with static leaves, as the package's examples write it."""
    optimizer = optimizer or optax.adam(1e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def loss_and_grads(model, *batch):
        return loss(model, *batch)

    def step(state, *batch):
        model, opt_state = state
        value, grads = loss_and_grads(model, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), opt_state), value

    return step, ((model, opt_state), *batch)


def squared(model, x, y):
    return optax.l2_loss(jax.vmap(model)(x), y).mean()


def mlp():
    model = eqx.nn.MLP(16, 4, 32, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    return fitted(model, squared, normal(16, 16), normal(16, 4, seed=1))


def convolutions():
    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.Lambda(jax.nn.leaky_relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.ConvTranspose2d(8, 4, 2, 2, key=keys[1]),
            eqx.nn.AdaptiveAvgPool2d(2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.LayerNorm(16),
            eqx.nn.WeightNorm(eqx.nn.Linear(16, 4, key=keys[2])),
        ]
    )
    return fitted(model, squared, normal(16, 3, 8, 8), normal(16, 4, seed=1))


class Encoder(eqx.Module):
    """Embedding, rotary positions, attention and RMS norm."""

    embed: eqx.nn.Embedding
    rotary: eqx.nn.RotaryPositionalEmbedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.RMSNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(32, 16, key=keys[0])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(4)
        self.attention = eqx.nn.MultiheadAttention(4, 16, dropout_p=0.1, key=keys[1])
        self.norm = eqx.nn.RMSNorm(16)
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(16, 8, key=keys[2])
        self.name = "encoder"

    def __call__(self, tokens, key):
        first, second = jax.random.split(key)
        x = jax.vmap(self.embed)(tokens)

        def turned(q, k, v):
            return jax.vmap(self.rotary, 1, 1)(q), jax.vmap(self.rotary, 1, 1)(k), v

        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + self.attention(x, x, x, mask, key=first, process_heads=turned)
        return self.out(self.dropout(jax.vmap(self.norm)(x).mean(0), key=second))


def attention():
    def loss(model, tokens, labels, key):
        logits = jax.vmap(model)(tokens, jax.random.split(key, tokens.shape[0]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return fitted(
        Encoder(jax.random.key(0)),
        loss,
        integers(32, 16, 8),
        integers(8, 16),
        jax.random.key(5),
        optimizer=optax.adamw(1e-2),
    )


class Recurrent(eqx.Module):
    """Cells scanned over time."""

    gru: eqx.nn.GRUCell
    lstm: eqx.nn.LSTMCell
    out: eqx.nn.Linear

    def __call__(self, xs):
        def one(carry, x):
            h, both = carry
            h = self.gru(x, h)
            both = self.lstm(h, both)
            return (h, both), both[0]

        zero = jnp.zeros(16, xs.dtype)
        _, hidden = jax.lax.scan(one, (zero, (zero, zero)), xs)
        return self.out(hidden[-1])


def cells():
    keys = jax.random.split(jax.random.key(0), 3)
    model = Recurrent(
        eqx.nn.GRUCell(8, 16, key=keys[0]), eqx.nn.LSTMCell(16, 16, key=keys[1]), eqx.nn.Linear(16, 4, key=keys[2])
    )
    return fitted(model, squared, normal(16, 6, 8), normal(16, 4, seed=1))


def stateful_norms():
    """BatchNorm over a vmapped axis and SpectralNorm, both with `eqx.nn.State`."""

    class Normed(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        second: eqx.nn.SpectralNorm

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            self.first = eqx.nn.Linear(16, 32, key=a)
            self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
            self.second = eqx.nn.SpectralNorm(eqx.nn.Linear(32, 4, key=b), "weight", key=c)

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.second(jax.nn.relu(x), state)

    model, start = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def step(both, x, y):
        model, state, opt_state = both

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(model, state):
            batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, state = batched(x, state)
            return optax.l2_loss(out, y).mean(), state

        (value, state), grads = loss(model, state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), state, opt_state), value

    return step, ((model, start, opt_state), normal(16, 16), normal(16, 4, seed=1))


def already_jitted():
    """A step under `eqx.filter_jit`, with an ensemble made by `eqx.filter_vmap` inside."""

    @eqx.filter_vmap
    def make(key):
        return eqx.nn.MLP(8, 1, 16, 2, key=key)

    def loss(models, x, y):
        out = eqx.filter_vmap(lambda model: jax.vmap(model)(x))(models)
        return jnp.square(out.mean(0) - y).mean()

    step, args = fitted(make(jax.random.split(jax.random.key(0), 8)), loss, normal(16, 8), normal(16, 1, seed=1))
    return eqx.filter_jit(step), args


def checkpointed_loop():
    """Gradients through `eqx.internal.while_loop` of the checkpointed kind, and through an `error_if`."""

    def loss(model, x, y):
        def body(carry):
            i, x = carry
            return i + 1, x + 0.1 * jax.vmap(model)(x)

        _steps, x = eqx.internal.while_loop(
            lambda c: c[0] < 5, body, (0, x), max_steps=8, kind="checkpointed", checkpoints=3
        )
        return optax.l2_loss(x, y).mean()

    model = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    return fitted(model, loss, normal(16, 16), normal(16, 16, seed=1))
