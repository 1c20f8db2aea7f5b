"""Differential equations of diffrax: their solution and its gradients."""

from __future__ import annotations

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix

from tests.public.data import normal
from tests.public.equinox_steps import fitted


class Field(eqx.Module):
    """A vector field given by a network."""

    mlp: eqx.nn.MLP

    def __init__(self, size, out, key):
        self.mlp = eqx.nn.MLP(size, out, 16, 1, activation=jax.nn.softplus, final_activation=jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.mlp(y)


TIMES = jnp.linspace(0.0, 1.0, 5)


def neural_ode(adjoint, solver=None, controller=None):
    def loss(field, start, target):
        def solve(y0):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                solver or diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.2,
                y0=y0,
                saveat=diffrax.SaveAt(ts=TIMES.astype(y0.dtype)),
                stepsize_controller=controller or diffrax.PIDController(rtol=1e-3, atol=1e-6),
                adjoint=adjoint,
                max_steps=32,
            ).ys

        return optax.l2_loss(jax.vmap(solve)(start), target).mean()

    return fitted(Field(4, 4, jax.random.key(0)), loss, normal(8, 4), normal(8, 5, 4, seed=1))


def checkpointed_adjoint():
    return neural_ode(diffrax.RecursiveCheckpointAdjoint())


def direct_adjoint():
    return neural_ode(diffrax.DirectAdjoint(), diffrax.Heun(), diffrax.ConstantStepSize())


def backsolve_adjoint():
    return neural_ode(diffrax.BacksolveAdjoint(), diffrax.Dopri5())


def stiff():
    """An implicit solver: Newton steps with linear solves inside adaptive steps."""

    def loss(rates, start):
        def field(t, y, rates):
            k1, k2, k3 = rates
            a = -k1 * y[0] + k3 * y[1] * y[2]
            b = k1 * y[0] - k2 * y[1] ** 2 - k3 * y[1] * y[2]
            return jnp.stack([a, b, k2 * y[1] ** 2])

        def solve(y0):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                diffrax.Kvaerno5(),
                t0=0.0,
                t1=2.0,
                dt0=1e-3,
                y0=y0,
                args=rates,
                stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
                max_steps=256,
            ).ys[-1]

        return jnp.square(jax.vmap(solve)(start)).sum()

    start = jnp.abs(normal(8, 3)) + 0.1
    return fitted(jnp.array([0.04, 3.0, 10.0]), loss, start, optimizer=optax.sgd(1e-3))


def stochastic():
    """A neural SDE driven by a virtual Brownian tree."""

    class Equation(eqx.Module):
        drift: Field
        diffusion: Field

    def loss(model, start, key):
        def solve(y0, key):
            path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(2,), key=key)

            def control(t, y, args):
                return model.diffusion(t, y, args).reshape(4, 2)

            terms = diffrax.MultiTerm(diffrax.ODETerm(model.drift), diffrax.ControlTerm(control, path))
            return diffrax.diffeqsolve(terms, diffrax.Heun(), 0.0, 1.0, 0.25, y0, max_steps=8).ys[-1]

        ends = jax.vmap(solve)(start, jax.random.split(key, start.shape[0]))
        return jnp.square(ends.mean(0) - 1).sum() + ends.var(0).sum()

    a, b = jax.random.split(jax.random.key(0))
    return fitted(Equation(Field(4, 4, a), Field(4, 8, b)), loss, normal(8, 4), jax.random.key(1))


def controlled():
    """A neural CDE: cubic interpolation of data, and a field that is a matrix."""

    class Classifier(eqx.Module):
        start: eqx.nn.Linear
        field: Field
        out: eqx.nn.Linear

        def __call__(self, ts, coefficients):
            control = diffrax.CubicInterpolation(ts, coefficients)

            def vector(t, y, args):
                return self.field(t, y, args).reshape(4, 3)

            term = diffrax.ControlTerm(vector, control).to_ode()
            y0 = self.start(control.evaluate(ts[0]))
            return self.out(diffrax.diffeqsolve(term, diffrax.Tsit5(), ts[0], ts[-1], 0.25, y0, max_steps=8).ys[-1])[0]

    def loss(model, x, labels):
        ts = TIMES.astype(x.dtype)
        coefficients = jax.vmap(lambda ys: diffrax.backward_hermite_coefficients(ts, ys))(x)
        return optax.sigmoid_binary_cross_entropy(jax.vmap(model, (None, 0))(ts, coefficients), labels).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    model = Classifier(eqx.nn.Linear(3, 4, key=keys[0]), Field(4, 12, keys[1]), eqx.nn.Linear(4, 1, key=keys[2]))
    return fitted(model, loss, normal(8, 5, 3), (normal(8, seed=1) > 0).astype(jnp.float32))


def event():
    """A bouncing ball: the time of an event found by a root solver, and its gradient."""

    def loss(gravity, heights):
        def fall(height):
            def field(t, y, g):
                return jnp.stack([y[1], -g])

            def ground(t, y, args, **kwargs):
                return y[0]

            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                diffrax.Tsit5(),
                0.0,
                jnp.inf,
                0.1,
                jnp.stack([height, jnp.zeros_like(height)]),
                args=gravity,
                event=diffrax.Event(ground, optimistix.Newton(1e-8, 1e-8)),
                max_steps=64,
            )
            return solution.ts[0]

        return jnp.square(jax.vmap(fall)(heights) - 1.0).mean()

    return fitted(jnp.asarray(9.8), loss, jnp.abs(normal(8)) + 1.0, optimizer=optax.sgd(0.1))
