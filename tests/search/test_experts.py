"""Expert parallelism that a person names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout
from autopar.search import Manual
from autopar.search.manual import expert_dims, expert_state
from tests.search.problems import f32, problem_of, toy


def step(params, momentum, x):
    """Each of four experts takes the tokens that a router gives it, in a loop over two layers."""

    def loss(params):
        def layer(h, w):
            shares = jax.nn.softmax(h @ w["router"])
            given = jnp.einsum("gse,gsm->egsm", shares, h)
            inner = jnp.tanh(jnp.einsum("egsm,emh->egsh", given, w["up"]))
            return h + jnp.einsum("egsh,hem->gsm", inner, w["down"]), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


@pytest.fixture(scope="module")
def problem():
    state = {"router": f32(2, 16, 4), "up": f32(2, 4, 16, 64), "down": f32(2, 64, 4, 16)}
    return problem_of(step, (state, state, f32(16, 8, 16)), toy(8))


def test_experts_are_batch_dims_of_products_with_activations(problem):
    dims = expert_dims(problem.graph)
    assert dims == {"params['up']": 1}  # "down" is summed over experts and hidden together: no batch dim
    state = expert_state(problem.graph, dims)
    assert state == {"params['up']": 1, "momentum['up']": 1}


def test_experts_lie_along_an_axis_of_their_own(problem):
    plan = Manual(dp=8, ep=4)(problem)
    assert plan.stages[0].mesh_shape == {"x": 2, "y": 4}
    layouts = {i.path: Layout.parse(i.layout).dims for i in plan.content.inputs}
    assert layouts["params['up']"] == layouts["momentum['up']"] == ((), ("y",), (), ())
    assert layouts["x"] == (("x", "y"), (), ())
    assert layouts["params['router']"] == ((), (), ())
    zero = Manual(dp=8, ep=4, zero=1)(problem)
    by_path = {i.path: Layout.parse(i.layout) for i in zero.content.inputs}
    assert by_path["momentum['up']"].dims[1] == ("y",) and "x" in by_path["momentum['up']"].axes
    assert by_path["params['up']"].axes == ("y",)


def test_what_has_no_experts_cannot_share_them(problem):
    with pytest.raises(InfeasiblePlanError, match="experts that 8 devices can share: there are 4"):
        Manual(dp=8, ep=8)(problem)
    with pytest.raises(InfeasiblePlanError, match="ep=3 does not divide dp=8"):
        Manual(dp=8, ep=3)(problem)
    plain = problem_of(lambda w, x: jnp.sum(x @ w), (f32(16, 16), f32(8, 16)), toy(8))
    with pytest.raises(InfeasiblePlanError, match="no parameter has a dim of experts"):
        Manual(dp=8, ep=2)(plain)
