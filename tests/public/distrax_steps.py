"""Distributions, bijectors and the hidden Markov model of distrax."""

from __future__ import annotations

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.public.data import gradient_step, normal


def fitted(loss, params, *batch, optimizer=None):
    optimizer = optimizer or optax.adam(1e-2)
    return gradient_step(loss, optimizer, optax.apply_updates), ((params, optimizer.init(params)), *batch)


def spline_flow():
    """Masked coupling layers of rational quadratic splines, conditioned by a haiku network."""
    events, bins = 4, 4

    def log_prob(x):
        layers = []
        mask = jnp.arange(events) % 2 == 0
        for _ in range(2):
            conditioner = hk.Sequential(
                [
                    hk.nets.MLP([16], activate_final=True),
                    hk.Linear(events * (3 * bins + 1)),
                    hk.Reshape((events, 3 * bins + 1)),
                ]
            )
            layers.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda p: distrax.RationalQuadraticSpline(p, range_min=-3.0, range_max=3.0),
                    conditioner=conditioner,
                )
            )
            mask = ~mask
        base = distrax.Independent(distrax.Normal(jnp.zeros(events), jnp.ones(events)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_prob))
    x = normal(16, events)

    def loss(params, x):
        return -model.apply(params, x).mean()

    return fitted(loss, model.init(jax.random.key(0), x), x)


def affine_bijectors():
    """Triangular, low-rank and elementwise bijectors in a chain; sampling and density."""

    def loss(params, x, key):
        chain = distrax.Chain(
            [
                distrax.LowerUpperTriangularAffine(params["lu"], params["bias"]),
                distrax.Block(distrax.Tanh(), 1),
                distrax.DiagPlusLowRankLinear(1.0 + jax.nn.softplus(params["bias"]), params["u"], params["v"]),
                distrax.Block(distrax.ScalarAffine(0.5, log_scale=params["bias"]), 1),
            ]
        )
        base = distrax.MultivariateNormalDiag(jnp.zeros_like(params["bias"]))
        flow = distrax.Transformed(base, chain)
        y, log_det = chain.forward_and_log_det(x)
        drawn, log_prob = flow.sample_and_log_prob(seed=key, sample_shape=(16,))
        return jnp.square(y).mean() - log_det.mean() + jnp.square(drawn).mean() + 0.01 * log_prob.mean()

    params = {
        "lu": jnp.eye(8) + 0.1 * normal(8, 8),
        "bias": 0.1 * normal(8, seed=1),
        "u": 0.1 * normal(8, 2, seed=2),
        "v": 0.1 * normal(8, 2, seed=3),
    }
    return fitted(loss, params, normal(16, 8, seed=4), jax.random.key(0))


def hidden_markov():
    """Forward-backward of an HMM, and its most likely path."""

    def model(params):
        return distrax.HMM(
            init_dist=distrax.Categorical(params["start"]),
            trans_dist=distrax.Categorical(params["move"]),
            obs_dist=distrax.Normal(params["mean"], jax.nn.softplus(params["scale"])),
        )

    optimizer = optax.adam(1e-2)

    def step(state, x):
        params, opt_state = state

        def loss(params):
            return -jax.vmap(lambda xs: model(params).forward_backward(xs)[3])(x).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": value, "path": jax.vmap(model(params).viterbi)(x)}

    params = {"start": jnp.zeros(4), "move": 0.1 * normal(4, 4), "mean": normal(4, seed=1), "scale": jnp.ones(4)}
    return step, ((params, optimizer.init(params)), normal(16, 8, seed=2))


def policies_and_mixtures():
    """Mixtures, discretized likelihoods, and a policy gradient with an entropy bonus."""

    def loss(params, x, key):
        hidden = x @ params["w"]
        mixture = distrax.MixtureSameFamily(
            distrax.Categorical(hidden[:, :3]), distrax.Normal(hidden[:, 3:6], jax.nn.softplus(hidden[:, 6:9]))
        )
        pixels = distrax.Quantized(distrax.Logistic(hidden[:, 9], 2.0), low=-5.0, high=5.0)
        policy = distrax.Softmax(hidden, temperature=2.0)
        actions, log_prob = policy.sample_and_log_prob(seed=key)
        rewards = jnp.cos(actions.astype(x.dtype))
        gamma = distrax.Gamma(1.0 + jnp.square(hidden[:, 0]), 1.0)
        kl = distrax.Normal(hidden[:, 1], 1.0).kl_divergence(distrax.Normal(0.0, 1.0))
        angle = distrax.VonMises(hidden[:, 2], 1.0).log_prob(x[:, 0])
        beta = distrax.Beta(2.0, 3.0).sample(seed=key, sample_shape=(16,))
        return (
            -mixture.log_prob(x[:, 0])
            - pixels.log_prob(jnp.round(x[:, 1]))
            - jax.lax.stop_gradient(rewards * beta) * log_prob
            - 0.1 * policy.entropy()
            - gamma.log_prob(jnp.abs(x[:, 2]) + 0.1)
            - angle
            + kl
        ).mean()

    return fitted(loss, {"w": 0.3 * normal(8, 10)}, normal(16, 8, seed=1), jax.random.key(2))
