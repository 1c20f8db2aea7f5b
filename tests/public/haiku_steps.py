"""Networks of dm-haiku."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.public.data import integers, normal

IMAGES = (normal(8, 16, 16, 3), integers(10, 8))


def stateful(forward, *batch, optimizer=None):
    """A step on ``forward(*batch) -> loss`` with state, transformed by `hk.transform_with_state`."""
    model = hk.transform_with_state(forward)
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    params, state = model.init(jax.random.key(0), *batch)

    def step(both, *batch):
        params, state, opt_state, key = both
        key, now = jax.random.split(key)
        (loss, state), grads = jax.value_and_grad(model.apply, has_aux=True)(params, state, now, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state, key), loss

    return step, ((params, state, optimizer.init(params), jax.random.key(1)), *batch)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def resnet18():
    def forward(x, labels):
        small = {"channels_per_group": (8, 8, 16, 16)}
        return cross_entropy(
            hk.nets.ResNet((1, 1, 1, 1), 10, bottleneck=False, use_projection=(True, True, True, True), **small)(
                x, is_training=True
            ),
            labels,
        )

    return stateful(forward, *IMAGES)


def mobilenet():
    def forward(x, labels):
        net = hk.nets.MobileNetV1((1, 2), (8, 16), 10, use_bn=True)
        return cross_entropy(net(x, is_training=True), labels)

    return stateful(forward, *IMAGES)


def vector_quantizer():
    def forward(x):
        hidden = hk.nets.MLP([32, 8])(x)
        quantized = hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.9)(hidden, is_training=True)
        other = hk.nets.VectorQuantizer(8, 16, 0.25)(hidden, is_training=True)
        out = hk.nets.MLP([32, 16])(quantized["quantize"] + other["quantize"])
        return jnp.square(out - x).mean() + quantized["loss"] + other["loss"]

    return stateful(forward, normal(32, 16), optimizer=optax.adam(1e-2))


def unrolled_lstm():
    def forward(x, y):
        core = hk.DeepRNN([hk.LSTM(16), jax.nn.tanh, hk.GRU(8)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return jnp.square(hk.BatchApply(hk.Linear(4))(out) - y).mean()

    return stateful(forward, normal(6, 16, 8), normal(6, 16, 4, seed=1))


def transformer():
    def forward(tokens):
        x = hk.Embed(32, 16)(tokens[:, :-1])
        x = x + hk.get_parameter("positions", x.shape[1:], init=hk.initializers.TruncatedNormal(0.02))
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        y = hk.LayerNorm(-1, True, True)(x)
        y = hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0), with_bias=False)(
            y, y, y, mask=mask
        )
        x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
        x = x + hk.nets.MLP([64, 16], activation=jax.nn.gelu)(hk.RMSNorm(-1)(x))
        return cross_entropy(hk.Linear(32)(x), tokens[:, 1:])

    return stateful(forward, integers(32, 8, 9), optimizer=optax.adamw(1e-2))


def conv_lstm_remat():
    def forward(x):
        core = hk.Conv2DLSTM((8, 8), 4, 3)

        def one(x, state):
            return core(x, state)

        state = jax.tree.map(lambda s: s.astype(x.dtype), core.initial_state(x.shape[0]))
        out, _ = hk.remat(one)(x, state)
        out, _ = hk.static_unroll(core, jnp.stack([out, out])[..., :4], state)
        out = hk.GroupNorm(2)(hk.SeparableDepthwiseConv2D(2, 3)(out[-1]))
        return jnp.square(out).mean() + jnp.square(hk.AvgPool(2, 2, "SAME")(out)).mean()

    return stateful(forward, normal(8, 8, 8, 4))


def layer_stack():
    def forward(x, y):
        @hk.experimental.layer_stack(3)
        def layers(x):
            return jax.nn.silu(hk.Linear(16)(x)) + x

        x = hk.SpectralNorm()(hk.get_parameter("w", (16, 16), init=hk.initializers.Orthogonal())) @ layers(x)[..., None]
        average = hk.ExponentialMovingAverage(0.9, name="average")(x.mean(0))
        return jnp.square(x[..., 0] - y).mean() + jnp.square(average).mean()

    return stateful(forward, normal(16, 16), normal(16, 16, seed=1))
