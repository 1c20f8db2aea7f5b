"""Updates of solver libraries: jaxopt, optimistix, lineax, kfac-jax, ott-jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxopt
import lineax
import optimistix
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn as ott_sinkhorn

from tests.public.data import normal

X, Y = normal(32, 8), normal(32, seed=1)


def ridge(params, x, y):
    return jnp.square(x @ params - y).mean() + 0.01 * jnp.square(params).sum()


def updated(solver, params, *batch):
    """``solver.update`` of jaxopt and its first state."""
    state = solver.init_state(params, *batch)

    def step(both, *batch):
        params, state = both
        new = solver.update(params, state, *batch)
        return (new.params, new.state), new.state.error

    return step, ((params, state), *batch)


def jaxopt_lbfgs():
    return updated(jaxopt.LBFGS(ridge, maxiter=10, history_size=3), jnp.zeros(8), X, Y)


def jaxopt_proximal():
    solver = jaxopt.ProximalGradient(
        lambda w, x, y: jaxopt.objective.least_squares(w, (x, y)), jaxopt.prox.prox_lasso, maxiter=5
    )
    state = solver.init_state(jnp.zeros(8), 0.1, X, Y)

    def step(both, x, y):
        params, state = both
        new = solver.update(params, state, 0.1, x, y)
        return (new.params, new.state), new.state.error

    return step, ((jnp.zeros(8), state), X, Y)


def jaxopt_implicit():
    """A hyperparameter's gradient through the implicit function theorem."""

    def step(log_penalty, x, y):
        def outer(log_penalty):
            def inner(w, penalty, x, y):
                return jnp.square(x @ w - y).mean() + penalty * jnp.square(w).sum()

            solver = jaxopt.GradientDescent(inner, maxiter=20, implicit_diff=True)
            w = solver.run(jnp.zeros(8, x.dtype), jnp.exp(log_penalty), x[:16], y[:16]).params
            return jnp.square(x[16:] @ w - y[16:]).mean()

        value, grad = jax.value_and_grad(outer)(log_penalty)
        return log_penalty - 0.1 * grad, value

    return step, (jnp.asarray(-1.0), X, Y)


def levenberg_marquardt():
    """`optimistix.least_squares`, whose solution a gradient goes through."""

    def residuals(w, args):
        x, y = args
        return jnp.tanh(x @ w) - y

    def step(scale, x, y):
        def outer(scale):
            solution = optimistix.least_squares(
                residuals,
                optimistix.LevenbergMarquardt(rtol=1e-8, atol=1e-8),
                jnp.zeros(8, x.dtype),
                args=(x * scale, 0.5 * jnp.tanh(y)),
                max_steps=20,
                throw=False,
            )
            return jnp.square(solution.value).sum()

        value, grad = jax.value_and_grad(outer)(scale)
        return scale - 0.01 * grad, value

    return step, (jnp.asarray(1.0), X, Y)


def root_find():
    def step(shift, x):
        def outer(shift):
            def residual(y, args):
                return y - jnp.tanh(args @ args.T @ y / 64 + shift)

            start = jnp.zeros(x.shape[0], x.dtype)
            newton = optimistix.Newton(rtol=1e-10, atol=1e-10)
            return optimistix.root_find(residual, newton, start, args=x, max_steps=12, throw=False).value.sum()

        value, grad = jax.value_and_grad(outer)(shift)
        return shift - 0.01 * grad, value

    return step, (jnp.asarray(0.3), normal(16, 8))


def linear_solves():
    """Iterative and direct solves with their gradients."""

    def step(w, x, y):
        def loss(w):
            matrix = x.T @ x / 32 + jnp.diag(jnp.exp(w))
            operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
            by_cg = lineax.linear_solve(operator, x.T @ y, lineax.CG(rtol=1e-12, atol=1e-12), throw=False).value
            by_cholesky = lineax.linear_solve(operator, x.T @ y, lineax.Cholesky()).value
            by_qr = lineax.linear_solve(lineax.MatrixLinearOperator(x), y, lineax.QR()).value
            return jnp.square(by_cg + by_cholesky - by_qr).sum() / 100

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.01 * grad, value

    return step, (jnp.zeros(8), X, Y)


def sinkhorn():
    """Optimal transport between point clouds; the cost's gradient moves the points."""

    def step(points, target):
        def cost(points):
            geometry = pointcloud.PointCloud(points, target, epsilon=0.5)
            solver = ott_sinkhorn.Sinkhorn(threshold=1e-3, max_iterations=50)
            out = solver(linear_problem.LinearProblem(geometry))
            return out.reg_ot_cost, out.n_iters

        (value, iterations), grad = jax.value_and_grad(cost, has_aux=True)(points)
        return points - 0.5 * grad, {"cost": value, "iterations": iterations}

    return step, (normal(16, 4), normal(16, 4, seed=1) + 1)
