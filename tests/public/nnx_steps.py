"""Modules, optimizers and metrics of flax.nnx, changed in place by the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.public.data import integers, normal


class Model(nnx.Module):
    """A convolutional classifier with batch norm and dropout."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


def classifier_metrics():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def step(state, x, labels):
        model, optimizer, metrics = state

        def loss_fn(model):
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=labels)
        optimizer.update(model, grads)
        return loss

    return step, ((model, optimizer, metrics), normal(16, 8, 8, 3), integers(10, 16))


class Encoder(nnx.Module):
    """Attention, layer norm and a LoRA layer."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, use_bias=False, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.lora = nnx.LoRA(16, 2, 16, base_module=nnx.Linear(16, 16, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.lora(self.norm(x + self.attention(x)))


def lora_attention():
    model = Encoder(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    def step(state, x, y):
        model, optimizer = state

        def loss_fn(model):
            return optax.l2_loss(model(x), y).mean()

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return loss

    return step, ((model, optimizer), normal(8, 4, 16), normal(8, 4, 16, seed=1))


class Recurrent(nnx.Module):
    """An LSTM and a GRU over time."""

    def __init__(self, rngs):
        wide = jnp.result_type(float)
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(8, 16, param_dtype=wide, rngs=rngs))
        self.second = nnx.RNN(nnx.GRUCell(16, 16, param_dtype=wide, rngs=rngs), reverse=True, keep_order=True)
        self.out = nnx.LinearGeneral(16, (2, 3), rngs=rngs)

    def __call__(self, x):
        return self.out(self.second(self.first(x)))


def recurrent():
    model = Recurrent(nnx.Rngs(2))
    optimizer = nnx.Optimizer(model, optax.rmsprop(1e-2), wrt=nnx.Param)

    def step(state, x, y):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.abs(m(x) - y)))(model)
        optimizer.update(model, grads)
        return loss

    return step, ((model, optimizer), normal(8, 6, 8), normal(8, 6, 2, 3, seed=1))


class Stack(nnx.Module):
    """Layers with stacked parameters, run by `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.remat
        def layer(x, layer):
            return nnx.gelu(layer(x))

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def scanned_layers():
    model = Stack(nnx.Rngs(3))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(state, x, y):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda m: optax.l2_loss(m(x), y).mean())(model)
        optimizer.update(model, grads)
        return loss

    return step, ((model, optimizer), normal(16, 16), normal(16, 16, seed=1))


def functional_split():
    """The functional form: graph definition closed over, state in and out."""
    model = Encoder(nnx.Rngs(4))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2)

    def step(state, x, y):
        params, opt_state = state

        def loss_fn(params):
            return optax.cosine_distance(nnx.merge(graph, params, rest)(x), y, epsilon=1e-6).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, ((params, optimizer.init(params)), normal(8, 4, 16), normal(8, 4, 16, seed=1))
