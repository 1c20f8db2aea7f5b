"""Inference steps of numpyro: `SVI.update`, and samplers' `sample`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.example_libraries import stax
from numpyro.contrib.control_flow import scan
from numpyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDelta,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from tests.public.data import integers, normal

X, Y = normal(32, 8), (normal(32, seed=1) > 0).astype(jnp.float32)


def logistic(x, y):
    """Bayesian logistic regression with a hierarchical prior."""
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("features", x.shape[1]):
        w = numpyro.sample("w", dist.Normal(0.0, scale))
    b = numpyro.sample("b", dist.StudentT(3.0, 0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def updated(model, guide, elbo, *batch, optimizer=None):
    """`SVI.update` and its first state."""
    svi = SVI(model, guide, optimizer or numpyro.optim.Adam(1e-2), elbo)
    return svi.update, (svi.init(jax.random.key(0), *batch), *batch)


def auto_normal():
    return updated(logistic, AutoNormal(logistic), Trace_ELBO(num_particles=4), X, Y)


def auto_multivariate():
    return updated(logistic, AutoMultivariateNormal(logistic), Trace_ELBO(), X, Y)


def auto_low_rank():
    return updated(
        logistic, AutoLowRankMultivariateNormal(logistic), Trace_ELBO(), X, Y, optimizer=numpyro.optim.ClippedAdam(1e-2)
    )


def auto_delta_minimize():
    """The MAP estimate by `numpyro.optim.Minimize`: BFGS inside the update."""
    return updated(logistic, AutoDelta(logistic), Trace_ELBO(), X, Y, optimizer=numpyro.optim.Minimize())


def auto_iaf():
    return updated(logistic, AutoIAFNormal(logistic, hidden_dims=[16, 16]), Trace_ELBO(), X, Y)


def auto_bnaf():
    return updated(logistic, AutoBNAFNormal(logistic, hidden_factors=[4, 4]), Trace_ELBO(), X, Y)


def enumerated_mixture():
    """A Gaussian mixture with its assignments summed out."""

    def model(x):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(4)))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("components", 4):
            centres = numpyro.sample("centres", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", x.shape[0]):
            which = numpyro.sample("which", dist.Categorical(weights), infer={"enumerate": "parallel"})
            numpyro.sample("x", dist.Normal(centres[which], scale), obs=x)

    guide = AutoNormal(numpyro.handlers.block(model, hide=["which"]))
    return updated(model, guide, TraceEnum_ELBO(max_plate_nesting=1), normal(32))


def amortized():
    """A variational autoencoder with stax networks, minibatches and a mean-field ELBO."""

    def encoder():
        return stax.serial(
            stax.Dense(32),
            stax.Softplus,
            stax.FanOut(2),
            stax.parallel(stax.Dense(4), stax.serial(stax.Dense(4), stax.Exp)),
        )

    def decoder():
        return stax.serial(stax.Dense(32), stax.Softplus, stax.Dense(16), stax.Sigmoid)

    def model(x):
        decode = numpyro.module("decoder", decoder(), (x.shape[0], 4))
        with numpyro.plate("batch", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
            numpyro.sample("x", dist.Bernoulli(decode(z)).to_event(1), obs=x)

    def guide(x):
        encode = numpyro.module("encoder", encoder(), (x.shape[0], 16))
        mean, deviation = encode(x)
        with numpyro.plate("batch", x.shape[0]):
            numpyro.sample("z", dist.Normal(mean, deviation).to_event(1))

    pixels = (normal(16, 16) > 0).astype(jnp.float32)
    return updated(model, guide, TraceMeanField_ELBO(), pixels)


def score_function():
    """A discrete latent variable, whose gradient is the score function's."""

    def model(x):
        with numpyro.plate("data", x.shape[0]):
            z = numpyro.sample("z", dist.Poisson(3.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        rate = numpyro.param("rate", jnp.full(x.shape, 2.0), constraint=dist.constraints.positive)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("z", dist.Poisson(rate))

    return updated(model, guide, TraceGraph_ELBO(), normal(32) + 3)


def random_walk():
    """A time series of `numpyro.contrib.control_flow.scan`."""

    def model(y):
        drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.Gamma(2.0, 2.0))

        def one(last, now):
            level = numpyro.sample("level", dist.Normal(last + drift, 0.5))
            numpyro.sample("y", dist.Normal(level, noise), obs=now)
            return level, None

        scan(one, 0.0, y)

    return updated(model, AutoNormal(model), Trace_ELBO(), normal(16))


def sampled(kernel, *batch):
    """One transition of a sampler after its initialization."""
    state = kernel.init(jax.random.PRNGKey(0), 4, None, batch, {})

    def step(state, *batch):
        state = kernel.sample(state, batch, {})
        return state, state.potential_energy if hasattr(state, "potential_energy") else None

    return step, (state, *batch)


def hmc():
    return sampled(HMC(logistic, num_steps=5), X, Y)


def nuts():
    return sampled(NUTS(logistic, max_tree_depth=4), X, Y)


def chains():
    """Whole runs of vectorized chains."""

    def step(state, x, y):
        mcmc = MCMC(
            NUTS(logistic, max_tree_depth=3),
            num_warmup=4,
            num_samples=4,
            num_chains=8,
            chain_method="vectorized",
            progress_bar=False,
        )
        key, now = jax.random.split(state)
        mcmc.run(now, x, y)
        return key, mcmc.get_samples(group_by_chain=True)

    return step, (jax.random.key(0), X, Y)


def discrete_regression():
    """Truncated, zero-inflated and ordered likelihoods in one model."""

    def model(x, counts):
        w = numpyro.sample("w", dist.Laplace(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(3, 1.0))
        cuts = numpyro.sample(
            "cuts", dist.TransformedDistribution(dist.Normal(0, 1).expand([3]), dist.transforms.OrderedTransform())
        )
        rate = jnp.exp(x @ w)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("count", dist.ZeroInflatedPoisson(0.2, rate), obs=counts)
            numpyro.sample("order", dist.OrderedLogistic(x @ w, cuts), obs=counts % 4)
            numpyro.sample("three", dist.MultivariateNormal(jnp.zeros(3), scale_tril=corr), obs=x[:, :3])
            numpyro.sample("cut", dist.TruncatedNormal(x @ w, 1.0, low=-4.0), obs=x[:, 0])

    return updated(model, AutoNormal(model), Trace_ELBO(), X, integers(6, 32))
