"""Optimizers whose state is small or dealt out, in compiled programs: what lies where, and what is sent beside SGD."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir import Layout
from autopar.lower.hlo import collectives
from benchmarks.experts.compare import total_wire_bytes
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import assert_trees_same

ROWS, COLUMNS, LAYERS, SIDE, DEVICES = 64, 128, 8, 64, 8
#: Bytes of the longest vector of a matrix.
VECTOR = 4 * max(ROWS, COLUMNS)
MATRICES = {"w1": (ROWS, COLUMNS), "w2": (COLUMNS, ROWS)}
SPLIT = {"state/0/w1": (0,), "state/0/w2": (0,)}
GRID = {"state/0/w1": (0, 1), "state/0/w2": (0, 1)}


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def two_layers(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["w1"]) @ p["w2"] - b["y"]) ** 2)


def stacked(p, b):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], p["layers"])
    return jnp.mean((x - b["y"]) ** 2)


def chained(p, b):
    """Layers that lie in arrays of their own."""
    x = b["x"]
    for name in sorted(p):
        x = jnp.tanh(x @ p[name])
    return jnp.mean((x - b["y"]) ** 2)


def shampoo(rate, decay=0.9):
    """Gupta et al., 2018: moving second moments of rows and columns, the update between their inverse fourth roots."""

    def root(m):
        values, vectors = jnp.linalg.eigh(m + 1e-3 * jnp.eye(len(m), dtype=m.dtype))
        return (vectors * values**-0.25) @ vectors.T

    def init(params):
        return jax.tree.map(lambda w: (jnp.zeros((w.shape[0],) * 2), jnp.zeros((w.shape[1],) * 2)), params)

    def update(grads, state, params=None):
        state = {
            n: (decay * rows + g @ g.T, decay * columns + g.T @ g)
            for (n, g), (rows, columns) in zip(grads.items(), state.values(), strict=True)
        }
        return {n: -rate * root(state[n][0]) @ g @ root(state[n][1]) for n, g in grads.items()}, state

    return optax.GradientTransformation(init, update)


def planned(optimizer, loss, params, *, bandwidth=1e9, mesh=(DEVICES,), constraints=None):
    """The decorated step, its arguments, its plan and what its compiled program sends."""

    def step(state, batch):
        weights, held = state
        value, grads = jax.value_and_grad(loss)(weights, batch)
        updates, held = optimizer.update(grads, held, weights)
        return (optax.apply_updates(weights, updates), held), value

    args = ((params, optimizer.init(params)), arrays({"x": (64, SIDE), "y": (64, SIDE)}, 1))
    run = autopar.parallelize(
        step,
        cluster=toy(bandwidth),
        mesh_shape=mesh,
        num_stages=1,
        num_microbatches=1,
        constraints=constraints,
        remat="none",
    )
    assert_trees_same(run(*args), jax.jit(step)(*args), 1e-4)
    return run.plan(*args), collectives(run.compile(*args).as_text())


def lies(plan, part):
    """Layouts of the arguments whose path holds ``part``, by the end of the path."""
    return {i.path: Layout.parse(i.layout) for i in plan.content.inputs if part in i.path}


def pieces(plan, part):
    """Into how many pieces arguments are split, by path."""
    (stage,) = plan.stages
    return {path: layout.shards(stage.mesh_shape) for path, layout in lies(plan, part).items()}


@pytest.mark.parametrize(("mesh", "constraints"), [((8,), SPLIT), ((2, 4), GRID)], ids=["rows", "grid"])
def test_adafactor_sends_vectors_and_scalars_beside_sgd(mesh, constraints):
    """Shazeer and Stern, 2018: n + m numbers of state a matrix, none of them whole anywhere, none as long as it."""
    options = {"mesh": mesh, "constraints": constraints}
    plan, sent = planned(optax.adafactor(1e-2, min_dim_size_to_factor=8), two_layers, arrays(MATRICES), **options)
    _, plain = planned(optax.sgd(1e-2), two_layers, arrays(MATRICES), **options)
    state = {**pieces(plan, ".v_row"), **pieces(plan, ".v_col")}
    assert len(state) == 4 and set(state.values()) == {DEVICES}
    more = total_wire_bytes(sent) - total_wire_bytes(plain)
    assert more <= 2 * len(MATRICES) * 4 * (ROWS + COLUMNS)
    assert sum(c.full_bytes > VECTOR for c in sent) <= sum(c.full_bytes > VECTOR for c in plain)
    assert any(4 < c.full_bytes <= VECTOR for c in sent)


@pytest.mark.slow
def test_sm3_lays_vectors_as_the_dims_of_its_momentum_and_takes_each_maximum_once():
    """Anil et al., 2019: a vector a dim. The vector of the split dim is there, of the others one all-reduce each."""
    plan, sent = planned(optax.sm3(1e-2), two_layers, arrays(MATRICES), constraints=SPLIT)
    momentum, vectors = lies(plan, ".nu["), lies(plan, ".mu[")
    for name in MATRICES:
        (whole,) = (layout for path, layout in momentum.items() if name in path)
        for dim, axes in enumerate(whole.dims):
            (vector,) = (layout for path, layout in vectors.items() if path.endswith(f"['{name}'][{dim}]"))
            assert vector.dims == (axes,)
    small = [c for c in sent if 4 < c.full_bytes <= VECTOR]
    assert [(c.kind, c.scope.rpartition("/")[2]) for c in small] == [("all-reduce", "pmax")] * len(MATRICES)


@pytest.mark.parametrize("bandwidth", [pytest.param(1e7, marks=pytest.mark.slow), 1e9])
def test_muon_deals_whole_matrices_out(bandwidth):
    """Each device orthogonalizes its layers: its iterations send nothing, whatever the links."""
    params = arrays({"layers": (LAYERS, SIDE, SIDE)})
    dims = {"layers": optax.contrib.MuonDimensionNumbers(1, 2)}
    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dims)
    plan, sent = planned(muon, stacked, params, bandwidth=bandwidth)
    assert lies(plan, "state[0]")["state[0]['layers']"].dims[0] == ("x",)
    iterations = [o for o in plan.content.operators if "dot_general" in o.id and o.operands[0].count(",") == 2]
    assert len(iterations) == 3 and not [c for c in sent if c.times == 5]
    assert all(operand.startswith("[x,.,.") for o in iterations for operand in o.operands)
    weights = 4 * math.prod((LAYERS, SIDE, SIDE))
    # Of the update nothing is left but the gradient on its way in, and the weights on their way to the passes.
    outside = [c for c in sent if c.times == 1 and c.full_bytes > 4]
    assert sum(c.full_bytes for c in outside) <= 2 * weights
    if bandwidth == 1e7:
        _, plain = planned(optax.sgd(1e-2), stacked, params, bandwidth=bandwidth)
        assert total_wire_bytes(sent) <= 1.01 * total_wire_bytes(plain)


@pytest.mark.parametrize(
    ("layers", "stack", "mesh"), [pytest.param(LAYERS, LAYERS, (8,), marks=pytest.mark.slow), (3, 4, (2, 4))]
)
def test_muon_deals_matrices_out_that_lie_in_arrays_of_their_own(layers, stack, mesh):
    """Equal iterations run as one of a stack: each device has whole matrices, and nothing is sent inside."""
    params = arrays({f"w{n}": (SIDE, SIDE) for n in range(layers)})
    plan, sent = planned(optax.contrib.muon(1e-2), chained, params, mesh=mesh)
    iterations = [o for o in plan.content.operators if "/body/" in o.id and "dot_general" in o.id]
    assert len(iterations) == 3 and not [c for c in sent if c.times > 1]
    assert not any(operand.startswith("[.") for o in iterations for operand in o.operands)
    # The stack goes to where its matrices are worked on and comes back: no more than its bytes, once each.
    assert sum(c.full_bytes >= 4 * SIDE**2 * stack for c in sent) <= 2


def test_shampoo_deals_its_roots_out_and_lays_its_factors_in_parts():
    """Of 4 matrices 8 factors: each device has the roots of one, and keeps its share of the state."""
    params = arrays({f"w{n}": (SIDE, SIDE) for n in range(LAYERS // 2)})
    plan, sent = planned(shampoo(1e-2), chained, params)
    (roots,) = [o for o in plan.content.operators if "eigh" in o.id]
    assert roots.operands[0].startswith("[x,")
    assert set(pieces(plan, "state[1]").values()) == {DEVICES}
    # The stack goes to where its roots are taken and comes back, each device its share.
    stacks = [c.kind for c in sent if c.full_bytes == DEVICES * 4 * SIDE**2]
    assert stacks == ["all-to-all"] * 2
    # By hand: the gradient whole for either factor, both roots whole, the update whole.
    _, plain = planned(optax.sgd(1e-2), chained, params)
    assert total_wire_bytes(sent) - total_wire_bytes(plain) <= len(params) * 5 * 4 * SIDE**2
