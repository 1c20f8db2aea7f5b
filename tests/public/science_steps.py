"""Physics, statistics, evolution and environments of research packages."""

from __future__ import annotations

import dynamax.hidden_markov_model as dynamax
import e3nn_jax as e3nn
import evosax.algorithms
import flashbax
import gymnax
import jax
import jax.numpy as jnp
import jax_md
import optax
import tinygp

from tests.public.data import gradient_step, integers, normal


def fitted(loss, params, *batch, optimizer=None):
    optimizer = optimizer or optax.adam(1e-2)
    return gradient_step(loss, optimizer, optax.apply_updates), ((params, optimizer.init(params)), *batch)


def equivariant():
    """Tensor products and spherical harmonics of e3nn on the edges of a graph."""
    inputs, hidden = e3nn.Irreps("4x0e + 2x1o"), e3nn.Irreps("4x0e + 4x1o + 2x2e")

    def loss(params, nodes, positions, senders, receivers, target):
        x = e3nn.IrrepsArray(inputs, nodes)
        harmonics = e3nn.spherical_harmonics(
            [0, 1, 2], e3nn.IrrepsArray("1o", positions[receivers] - positions[senders]), True
        )
        messages = e3nn.tensor_product(x[senders], harmonics, filter_ir_out=[ir for _, ir in hidden])
        summed = e3nn.scatter_sum(messages, dst=receivers, output_size=nodes.shape[0])
        linear = e3nn.FunctionalLinear(summed.irreps, e3nn.Irreps("1x0e + 1x1o"))
        weights = [params[f"{i}"] for i in range(len(linear.instructions))]
        out = jax.vmap(lambda x: linear(weights, x))(summed)
        return jnp.square(out.array - target).mean()

    x = e3nn.IrrepsArray(inputs, normal(16, inputs.dim))
    harmonics = e3nn.spherical_harmonics([0, 1, 2], e3nn.IrrepsArray("1o", normal(16, 3)), True)
    middle = e3nn.tensor_product(x, harmonics, filter_ir_out=[ir for _, ir in hidden]).irreps
    linear = e3nn.FunctionalLinear(middle, e3nn.Irreps("1x0e + 1x1o"))
    params = {f"{i}": normal(*one.path_shape, seed=i) for i, one in enumerate(linear.instructions)}
    return fitted(
        loss,
        params,
        normal(16, inputs.dim),
        normal(16, 3, seed=1),
        integers(16, 32),
        (integers(16, 32) + 1 + integers(15, 32, seed=2)) % 16,
        normal(16, 4, seed=3),
    )


def gaussian_process():
    """The marginal likelihood of tinygp."""

    def loss(params, x, y):
        kernel = jnp.exp(params["amplitude"]) * tinygp.kernels.Matern52(jnp.exp(params["scale"]))
        kernel += tinygp.kernels.ExpSineSquared(scale=1.5, gamma=jnp.exp(params["gamma"]))
        return -tinygp.GaussianProcess(kernel, x, diag=jnp.exp(params["noise"])).log_probability(y)

    params = {
        "amplitude": jnp.asarray(0.1),
        "scale": jnp.asarray(0.2),
        "gamma": jnp.asarray(0.3),
        "noise": jnp.asarray(-1.0),
    }
    x = jnp.sort(normal(32))
    return fitted(loss, params, x, jnp.sin(3 * x))


def expectation_maximization():
    """An EM step of dynamax's Gaussian hidden Markov model."""
    model = dynamax.GaussianHMM(3, 2)
    params, properties = model.initialize(jax.random.key(0))
    carried = model.initialize_m_step_state(params, properties)

    def step(state, emissions):
        params, carried = state
        statistics, log_prob = jax.vmap(lambda e: model.e_step(params, e))(emissions)
        params, carried = model.m_step(params, properties, statistics, carried)
        return (params, carried), log_prob.sum()

    return step, ((params, carried), normal(8, 12, 2))


def evolution():
    """CMA-ES of evosax on a network's loss, vmapped over the population."""
    strategy = evosax.algorithms.CMA_ES(population_size=16, solution=jnp.zeros(8))
    config = strategy.default_params
    state = strategy.init(jax.random.key(0), jnp.zeros(8), config)

    def step(both, x, y):
        state, key = both
        key, first, second = jax.random.split(key, 3)
        population, state = strategy.ask(first, state, config)
        fitness = jax.vmap(lambda w: jnp.square(jnp.tanh(x @ w) - y).mean())(population)
        state, _ = strategy.tell(second, population, fitness, state, config)
        return (state, key), fitness.min()

    return step, ((state, jax.random.key(1)), normal(32, 8), normal(32, seed=1))


def rollouts():
    """Policy gradients through scanned rollouts of gymnax's CartPole."""
    environment, config = gymnax.make("CartPole-v1")

    def loss(params, key):
        def episode(key):
            key, start = jax.random.split(key)
            seen, state = environment.reset(start, config)

            def one(carry, key):
                seen, state = carry
                first, second = jax.random.split(key)
                logits = jnp.tanh(seen @ params["first"]) @ params["second"]
                action = jax.random.categorical(first, logits)
                log_prob = jax.nn.log_softmax(logits)[action]
                seen, state, reward, *_ = environment.step(second, state, action, config)
                return (seen, state), (log_prob, reward)

            _, (log_probs, rewards) = jax.lax.scan(one, (seen, state), jax.random.split(key, 6))
            return -(log_probs * jnp.cumsum(rewards[::-1])[::-1]).sum()

        return jax.vmap(episode)(jax.random.split(key, 8)).mean()

    return fitted(loss, {"first": normal(4, 8), "second": normal(8, 2, seed=1)}, jax.random.key(0))


def replay():
    """A step that writes to flashbax's buffer, samples from it, and trains."""
    buffer = flashbax.make_item_buffer(max_length=64, min_length=8, sample_batch_size=16, add_batches=True)
    optimizer = optax.adam(1e-2)

    def step(state, x, y):
        params, opt_state, stored, key = state
        key, now = jax.random.split(key)
        stored = buffer.add(stored, {"x": x, "y": y})
        sample = buffer.sample(stored, now).experience

        def loss(params):
            return jnp.square(sample["x"] @ params - sample["y"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, stored, key), value

    params = normal(8)
    stored = buffer.init({"x": jnp.zeros(8), "y": jnp.zeros(())})
    return step, ((params, optimizer.init(params), stored, jax.random.key(0)), normal(16, 8), normal(16, seed=1))


def molecular_dynamics():
    """Velocity Verlet steps of jax-md with a soft-sphere potential, in a scan."""
    displacement, shift = jax_md.space.periodic(4.0)
    energy = jax_md.energy.soft_sphere_pair(displacement)
    init, apply = jax_md.simulate.nve(energy, shift, dt=1e-2)
    state = init(jax.random.key(0), jnp.abs(normal(32, 2)) % 4.0, kT=0.1)

    def step(state):
        state = jax.lax.fori_loop(0, 4, lambda i, s: apply(s), state)
        return state, energy(state.position)

    return step, (state,)
