"""Losses, optimizers and projections of optax."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from tests.public.data import gradient_step, integers, normal


def network(sizes=(16, 64, 10)):
    """Parameters of a plain network."""
    pairs = list(itertools.pairwise(sizes))
    return [{"w": normal(a, b, seed=i) / a**0.5, "b": jnp.zeros((b,))} for i, (a, b) in enumerate(pairs)]


def logits_of(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels).mean()


BATCH = (normal(32, 16, seed=9), integers(10, 32))


def trained(optimizer, loss=cross_entropy, batch=BATCH, params=None):
    params = network() if params is None else params
    return gradient_step(loss, optimizer, optax.apply_updates), ((params, optimizer.init(params)), *batch)


def adafactor():
    return trained(optax.adafactor(1e-2, min_dim_size_to_factor=8))


def lion_of_clipped():
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adaptive_grad_clip(0.1),
        optax.lion(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    )
    return trained(optimizer)


def multi_steps():
    return trained(optax.MultiSteps(optax.adamw(1e-2), 2))


def muon():
    return trained(optax.contrib.muon(1e-2))


def schedule_free():
    return trained(optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2))


def prodigy():
    return trained(optax.contrib.prodigy())


def mechanized():
    return trained(optax.contrib.mechanize(optax.adam(1e-2)))


def dadapt():
    return trained(optax.contrib.dadapt_adamw())


def adopt_if_finite():
    return trained(optax.apply_if_finite(optax.contrib.adopt(1e-2), 3))


def sharpness_aware():
    return trained(optax.contrib.sam(optax.adam(1e-2), optax.sgd(0.05), sync_period=2))


def lookahead():
    optimizer = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)
    fast = network()
    params = optax.LookaheadParams.init_synced(fast)

    def step(state, x, labels):
        params, opt_state = state
        loss, grads = jax.value_and_grad(cross_entropy)(params.fast, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, ((params, optimizer.init(params)), *BATCH)


def private():
    optimizer = optax.contrib.dpsgd(0.05, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0)

    def step(state, x, labels):
        params, opt_state = state
        grads = jax.vmap(jax.grad(cross_entropy), (None, 0, 0))(params, x[:, None], labels[:, None])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), optax.tree.norm(grads)

    params = network()
    return step, ((params, optimizer.init(params)), *BATCH)


def lbfgs():
    optimizer = optax.lbfgs(memory_size=4)

    def step(state, x, labels):
        params, opt_state = state

        def loss(p):
            return cross_entropy(p, x, labels)

        value, grads = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value, grad=grads, value_fn=loss)
        return (optax.apply_updates(params, updates), opt_state), value

    params = network()
    return step, ((params, optimizer.init(params)), *BATCH)


def projected():
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def loss(params, x, y):
        return optax.huber_loss(x @ params["mix"], y).mean() + optax.l2_loss(params["ball"] - 1).sum()

    def step(state, x, y):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        mix = jax.vmap(optax.projections.projection_simplex, 1, 1)(params["mix"])
        ball = optax.projections.projection_l1_ball(params["ball"], 2.0)
        return ({"mix": mix, "ball": ball}, opt_state), value

    params = {"mix": jnp.full((16, 8), 1 / 16), "ball": normal(64)}
    return step, ((params, optimizer.init(params)), normal(32, 16), normal(32, 8, seed=1))


def ctc():
    def loss(params, x, labels):
        logits = logits_of(params, x)
        paddings = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, paddings, labels, jnp.zeros(labels.shape)).mean()

    return trained(optax.rmsprop(1e-2), loss, (normal(16, 12, 16), integers(9, 16, 4) + 1))


def perturbed_ranking():
    def ranks(values):
        return jnp.argsort(jnp.argsort(values, -1), -1).astype(values.dtype)

    smooth = optax.perturbations.make_perturbed_fun(ranks, num_samples=8, sigma=0.5)

    def loss(params, key, x, target):
        return optax.squared_error(smooth(key, logits_of(params, x)), target).mean()

    return trained(optax.yogi(1e-2), loss, (jax.random.key(1), normal(32, 16), normal(32, 10, seed=3)))


def metric_losses():
    def loss(params, x, labels):
        z = logits_of(params, x)
        other = logits_of(params, x[::-1])
        return (
            optax.losses.ntxent(z, labels)
            + optax.cosine_distance(z, other, epsilon=1e-6).mean()
            + optax.sigmoid_focal_loss(z, jax.nn.one_hot(labels, 10)).mean()
            + optax.losses.poly_loss_cross_entropy(z, jax.nn.one_hot(labels, 10)).mean()
            + optax.losses.ranking_softmax_loss(z, other)
        )

    return trained(optax.novograd(1e-2), loss)


def labelled_parts():
    optimizer = optax.partition(
        {"w": optax.contrib.ademamix(1e-2), "b": optax.sgd(1e-1)},
        [{"w": "w", "b": "b"}] * 2,
    )
    averaged = optax.chain(optimizer, optax.ema(0.9))
    return trained(averaged)


def hungarian():
    def loss(params, x, y):
        costs = jnp.square(logits_of(params, x)[:, None] - y[None]).sum(-1)
        rows, columns = optax.assignment.hungarian_algorithm(jax.lax.stop_gradient(costs))
        return costs[rows, columns].mean()

    return trained(optax.adam(1e-2), loss, (normal(16, 16), normal(16, 10, seed=2)))
