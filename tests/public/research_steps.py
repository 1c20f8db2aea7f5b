"""Agents, graphs, samplers and simulations of research packages."""

from __future__ import annotations

import blackjax
import jax
import jax.numpy as jnp
import jraph
import mctx
import optax
import rlax

from tests.public.data import gradient_step, integers, normal


def fitted(loss, params, *batch, optimizer=None):
    optimizer = optimizer or optax.adam(1e-2)
    return gradient_step(loss, optimizer, optax.apply_updates), ((params, optimizer.init(params)), *batch)


def vtrace_actor_critic():
    """rlax's V-trace, policy gradient and entropy losses over a batch of trajectories."""

    def loss(params, x, actions, rewards):
        logits, values = x @ params["policy"], (x @ params["value"])[..., 0]
        behaviour = jax.lax.stop_gradient(0.5 * logits)

        def one(logits, behaviour, values, actions, rewards):
            rhos = rlax.categorical_importance_sampling_ratios(logits, behaviour, actions)[:-1]
            discounts = jnp.full_like(rewards, 0.9)[:-1]
            out = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards[:-1], discounts, rhos)
            weights = jnp.ones_like(rhos)
            policy = rlax.policy_gradient_loss(logits[:-1], actions[:-1], out.pg_advantage, weights)
            return policy + 0.5 * jnp.square(out.errors).sum() + 0.01 * rlax.entropy_loss(logits[:-1], weights)

        return jax.vmap(one)(logits, behaviour, values, actions, rewards).mean()

    params = {"policy": 0.3 * normal(8, 4), "value": 0.3 * normal(8, 1, seed=1)}
    return fitted(loss, params, normal(16, 6, 8, seed=2), integers(4, 16, 6), normal(16, 6, seed=3))


def distributional_q():
    """rlax's categorical and quantile Q learning, with a target network that moves slowly."""
    atoms = jnp.linspace(-2.0, 2.0, 11)
    optimizer = optax.adam(1e-2)

    def step(state, x, actions, rewards, after):
        params, target, opt_state = state

        def loss(params):
            q, q_after = (x @ params["q"]).reshape(-1, 4, 11), (after @ target["q"]).reshape(-1, 4, 11)
            discount = jnp.full_like(rewards, 0.9)
            support = atoms.astype(x.dtype)
            categorical = jax.vmap(rlax.categorical_q_learning, (None, 0, 0, 0, 0, None, 0))
            quantile = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))
            taus = (jnp.arange(11, dtype=x.dtype) + 0.5) / 11
            swapped, after_swapped = q.swapaxes(1, 2), q_after.swapaxes(1, 2)
            return (
                categorical(support, q, actions, rewards, discount, support, q_after)
                + quantile(swapped, taus, actions, rewards, discount, after_swapped, after_swapped, 1.0)
            ).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, optax.incremental_update(params, target, 0.1), opt_state), value

    params = {"q": 0.3 * normal(8, 44)}
    state = (params, {"q": jnp.copy(params["q"])}, optimizer.init(params))
    return step, (state, normal(16, 8, seed=1), integers(4, 16), normal(16, seed=2), normal(16, 8, seed=3))


def muzero_search():
    """A policy trained towards the visit counts of mctx's Gumbel MuZero search."""

    def loss(params, x, key):
        def recurrent(params, key, action, hidden):
            hidden = jnp.tanh(hidden @ params["move"] + jax.nn.one_hot(action, 4, dtype=hidden.dtype) @ params["act"])
            out = mctx.RecurrentFnOutput(
                reward=hidden[:, 0],
                discount=jnp.full_like(hidden[:, 0], 0.9),
                prior_logits=hidden @ params["policy"],
                value=hidden[:, 1],
            )
            return out, hidden

        hidden = jnp.tanh(x @ params["move"])
        root = mctx.RootFnOutput(prior_logits=hidden @ params["policy"], value=hidden[:, 1], embedding=hidden)
        found = mctx.gumbel_muzero_policy(
            jax.lax.stop_gradient(params), key, jax.lax.stop_gradient(root), recurrent, num_simulations=4, max_depth=3
        )
        return optax.softmax_cross_entropy(root.prior_logits, found.action_weights).mean()

    params = {"move": 0.3 * normal(8, 8), "act": normal(4, 8, seed=1), "policy": normal(8, 4, seed=2)}
    return fitted(loss, params, normal(8, 8, seed=3), jax.random.key(0))


def graph_network():
    """jraph's GraphNetwork and attention on a batch of graphs with ragged sizes."""
    sizes = [3, 5, 2, 6]
    graphs = [
        jraph.GraphsTuple(
            nodes=normal(n, 8, seed=i),
            edges=normal(2 * n, 4, seed=10 + i),
            senders=integers(n, 2 * n, seed=i),
            receivers=integers(n, 2 * n, seed=20 + i),
            globals=jnp.zeros((1, 4)),
            n_node=jnp.array([n]),
            n_edge=jnp.array([2 * n]),
        )
        for i, n in enumerate(sizes)
    ]
    batch = jraph.pad_with_graphs(jraph.batch(graphs), 24, 40, 8)

    def loss(params, graph, labels):
        def dense(name):
            return jraph.concatenated_args(lambda x: jax.nn.relu(x @ params[name]))

        network = jraph.GraphNetwork(
            update_edge_fn=dense("edge"), update_node_fn=dense("node"), update_global_fn=dense("globe")
        )
        graph = network(graph)
        attention = jraph.GAT(
            attention_query_fn=lambda x: x @ params["query"],
            attention_logit_fn=lambda s, r, e: jnp.sum(s * r, -1, keepdims=True),
            node_update_fn=jnp.tanh,
        )
        graph = attention(graph._replace(edges=None))
        pooled = jraph.segment_mean(graph.nodes, jnp.repeat(jnp.arange(8), graph.n_node, total_repeat_length=24), 8)
        mask = jraph.get_graph_padding_mask(graph)
        return jnp.where(mask, jnp.square(pooled.sum(-1) + graph.globals.sum(-1) - labels), 0).sum()

    params = {
        "edge": 0.3 * normal(8 + 8 + 4 + 4, 4),
        "node": 0.3 * normal(8 + 4 + 4 + 4, 8, seed=1),
        "globe": 0.3 * normal(8 + 4 + 4, 4, seed=2),
        "query": 0.3 * normal(8, 8, seed=3),
    }
    return fitted(loss, params, batch, normal(8, seed=4))


def log_density(x, y):
    def density(w):
        return -jnp.sum(jnp.logaddexp(0.0, -y * (x @ w))) - 0.5 * jnp.sum(w**2)

    return density


DATA = (normal(32, 8), jnp.sign(normal(32, seed=1)))


def transition(make):
    """One transition of a blackjax kernel on a logistic regression."""
    key = jax.random.key(0)
    state = make(log_density(*DATA)).init(jnp.zeros(8))

    def step(both, x, y):
        state, key = both
        key, now = jax.random.split(key)
        state, info = make(log_density(x, y)).step(now, state)
        return (state, key), {"accepted": getattr(info, "acceptance_rate", None)}

    return step, ((state, key), *DATA)


def blackjax_hmc():
    return transition(lambda f: blackjax.hmc(f, 0.05, jnp.ones(8), 5))


def blackjax_nuts():
    return transition(lambda f: blackjax.nuts(f, 0.1, jnp.ones(8), max_num_doublings=4))


def blackjax_mala():
    return transition(lambda f: blackjax.mala(f, 0.01))
