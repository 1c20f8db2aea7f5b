"""Modules and training utilities of flax.linen and flax.training."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import common_utils, dynamic_scale, lr_schedule, train_state

from tests.public.data import integers, normal


class StatsState(train_state.TrainState):
    """A train state with running statistics."""

    batch_stats: dict


def fitted(module, x, y, optimizer=None, **init):
    """A `TrainState` and a step on the mean squared error."""
    variables = module.init(jax.random.key(0), x, **init)
    state = train_state.TrainState.create(
        apply_fn=module.apply, params=variables["params"], tx=optimizer or optax.adam(1e-2)
    )

    def step(state, x, y):
        def loss(params):
            return jnp.mean(jnp.square(state.apply_fn({"params": params}, x) - y))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return step, (state, x, y)


class Block(nn.Module):
    """A pre-norm transformer block of flax's own layers."""

    heads: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(self.heads, dropout_rate=0.1, deterministic=not train, use_bias=False)(y)
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.Dense(4 * x.shape[-1])(nn.RMSNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Classifier(nn.Module):
    """Tokens to classes."""

    @nn.compact
    def __call__(self, tokens, train=False):
        x = nn.Embed(32, 16)(tokens)
        x = Block()(x, train)
        return nn.Dense(8)(x.mean(1))


def transformer_dropout():
    model = Classifier()
    tokens, labels = integers(32, 16, 8), integers(8, 16, seed=1)
    params = model.init(jax.random.key(0), tokens)["params"]
    schedule = lr_schedule.create_cosine_learning_rate_schedule(1e-2, 4, 1, 10)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(schedule))

    def step(state, tokens, labels, key):
        key = jax.random.fold_in(key, state.step)

        def loss(params):
            logits = state.apply_fn({"params": params}, tokens, True, rngs={"dropout": key})
            return -jnp.mean(jnp.sum(common_utils.onehot(labels, 8) * nn.log_softmax(logits), -1)), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value, "right": jnp.sum(logits.argmax(-1) == labels)}

    return step, (state, tokens, labels, jax.random.key(3))


class ConvNet(nn.Module):
    """A small convolutional network with batch and group norms."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (3, 3), strides=2)(x)))
        x = nn.ConvTranspose(8, (2, 2), strides=(2, 2))(x)
        x = nn.avg_pool(x, (2, 2), padding="SAME")
        return nn.Dense(10)(x.reshape((x.shape[0], -1)))


def batch_norm():
    model, x, labels = ConvNet(), normal(16, 8, 8, 3), integers(10, 16)
    variables = model.init(jax.random.key(0), x, True)
    state = StatsState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )

    def step(state, x, labels):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), value

    return step, (state, x, labels)


def bidirectional_lstm():
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, x):
            wide = jnp.result_type(float)
            first = nn.RNN(nn.OptimizedLSTMCell(16, param_dtype=wide))
            both = nn.Bidirectional(first, nn.RNN(nn.GRUCell(16, param_dtype=wide)))
            return nn.Dense(4)(both(x))

    return fitted(Tagger(), normal(8, 6, 8), normal(8, 6, 4, seed=1))


def scanned_remat():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block(2)(x), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.remat(Layer, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
            scanned = nn.scan(
                layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=3
            )
            return scanned()(x, None)[0]

    return fitted(Deep(), normal(8, 4, 16), normal(8, 4, 16, seed=1))


def weight_norms():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.PReLU()(nn.WeightNorm(nn.Dense(32))(x))
            x = nn.Einsum((32, 4, 8), "...a,abc->...bc")(x)
            x = nn.DenseGeneral(16, axis=(-2, -1))(nn.swish(x))
            return nn.InstanceNorm()(x[:, :, None])[..., 0]

    return fitted(Normed(), normal(16, 16), normal(16, 16, seed=1))


def spectral_norm():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.SpectralNorm(nn.Dense(32))(x, update_stats=train)
            return nn.Dense(4)(nn.leaky_relu(x))

    model, x, y = Normed(), normal(16, 16), normal(16, 4, seed=1)
    variables = model.init(jax.random.key(0), x, True)
    state = StatsState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2), batch_stats=variables["batch_stats"]
    )

    def step(state, x, y):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updates = state.apply_fn(variables, x, True, mutable=["batch_stats"])
            return optax.l2_loss(out, y).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), value

    return step, (state, x, y)


def scaled_half():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(32, dtype=jnp.float16)(x))
            return nn.Dense(4, dtype=jnp.float16)(x)

    model, x, y = Half(), normal(16, 16), normal(16, 4, seed=1)
    params = model.init(jax.random.key(0), x)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def step(both, x, y):
        state, scale = both

        def loss(params):
            return jnp.mean(jnp.square(state.apply_fn({"params": params}, x).astype(jnp.float32) - y))

        scale, finite, value, grads = scale.value_and_grad(loss)(state.params)
        new = state.apply_gradients(grads=grads)
        keep = functools.partial(jnp.where, finite)
        new = new.replace(
            opt_state=jax.tree.map(keep, new.opt_state, state.opt_state),
            params=jax.tree.map(keep, new.params, state.params),
        )
        return (new, scale), {"loss": value, "finite": finite}

    return step, ((state, dynamic_scale.DynamicScale(growth_interval=1)), x, y)


def autoregressive_decode():
    """Attention with a cache that is written one position a call."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2, decode=True)(x)

    model, x = Decoder(), normal(8, 4, 16)
    variables = model.init(jax.random.key(0), x)

    def step(variables, x):
        def one(cache, token):
            out, updates = model.apply(
                {"params": variables["params"], "cache": cache}, token[:, None], mutable=["cache"]
            )
            return updates["cache"], out[:, 0]

        cache, out = jax.lax.scan(one, variables["cache"], x.swapaxes(0, 1)[:2])
        return {"params": variables["params"], "cache": cache}, out

    return step, (variables, x)
