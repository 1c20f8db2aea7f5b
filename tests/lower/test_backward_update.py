"""The update of stacks inside of the backward loop: values of the plain step, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir import Graph
from autopar.ir.layer_loops import replaced_in_place
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.lower.layer_techniques import backward_updates, update_in_backward, updated_in_backward
from tests.microbatch.running import run, traced

OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "nesterov": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "clipped by value": lambda: optax.chain(optax.clip(0.01), optax.adam(1e-2)),
}


def model(
    optimizer: Any,
    *,
    layers: int = 3,
    width: int = 4,
    remat: bool = True,
    tied: bool = False,
    widths: tuple[int, ...] = (6,),
    average: bool = False,
    metric: str = "",
    deviation: float = 0.5,
) -> tuple[Any, Any]:
    """A train step of a stack of layers between an embedding and a head, and its arguments.

    Args:
        optimizer: of optax.
        layers: number of them.
        width: of the residual stream.
        remat: whether a layer is checkpointed.
        tied: whether the head is the embedding.
        widths: inside of each block of a layer.
        average: whether the state has an average of the parameters.
        metric: "norm" or "gradients" for what the step returns besides the loss.
        deviation: of the parameters.
    """

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        def layer(y: jax.Array, blocks: Any) -> tuple[jax.Array, None]:
            for block in blocks:
                y = y + jnp.tanh(y @ block["up"] * block["scale"]) @ block["down"]
            return y, None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, params["embed"][tokens], params["layers"])
        head = params["embed"].T if tied else params["head"]
        return -jnp.mean(jax.nn.log_softmax(y @ head)[:, :, 0])

    def step(state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "moments": moments}
        if average:
            new["average"] = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        more = {"": 0.0, "norm": optax.tree.norm(grads), "gradients": grads}[metric]
        return new, (value, more)

    def drawn(number: int, *shape: int) -> jax.Array:
        return deviation * jax.random.normal(jax.random.fold_in(jax.random.key(1), number), shape, jnp.float64)

    vocab = 5
    blocks = [
        {
            "up": drawn(3 * n, layers, width, w),
            "scale": drawn(3 * n + 1, layers, w),
            "down": drawn(3 * n + 2, layers, w, width),
        }
        for n, w in enumerate(widths)
    ]
    params = {"embed": drawn(100, vocab, width), "layers": blocks}
    if not tied:
        params["head"] = drawn(101, width, vocab)
    state = {"params": params, "moments": optimizer.init(params)}
    if average:
        state["average"] = params
    return step, (state, jnp.arange(6, dtype=jnp.int32).reshape(2, 3) % vocab)


def assert_same(step: Any, args: Any) -> Graph:
    """The updated step returns what ``step`` does; its graph."""
    plain, leaves = traced(step, args)
    updated = updated_in_backward(plain)
    for a, b in zip(run(updated, leaves), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    return updated.graph


def stacks_of_gradients(graph: Graph) -> list[str]:
    """Names of stacks that backward loops make and that replace nothing."""
    replacing = {o.operand for o in graph.outputs if o.updates}
    return [
        v.name
        for op in graph.operators
        if op.primitive == "scan" and phase_of(op) == "backward"
        for v in op.results[Scan.of(op).num_carry :]
        if v.name not in replacing
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("remat", "tied"), [(True, False), (False, True)])
def test_optimizers_update_in_the_loop(x64: None, optimizer: str, remat: bool, tied: bool) -> None:
    graph = assert_same(*model(OPTIMIZERS[optimizer](), remat=remat, tied=tied))
    assert not stacks_of_gradients(graph)
    (loop,) = (op for op in graph.operators if op.primitive == "scan" and phase_of(op) == "backward")
    stacks = [i.name for i in graph.inputs if "['layers']" in i.name]
    assert {loop.operands[n] for n in replaced_in_place(graph, loop)} == set(stacks)


def test_an_average_of_parameters_is_updated_too(x64: None) -> None:
    graph = assert_same(*model(optax.adam(1e-2), average=True))
    assert not stacks_of_gradients(graph)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    layers=st.integers(2, 5),
    width=st.integers(2, 5),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    remat=st.booleans(),
    tied=st.booleans(),
    average=st.booleans(),
    metric=st.sampled_from(["", "", "norm", "gradients"]),
)
def test_drawn_models(optimizer: str, metric: str, **sizes: Any) -> None:
    with jax.enable_x64(True):
        graph = assert_same(*model(OPTIMIZERS[optimizer](), metric=metric, **sizes))
    # Where gradients are needed whole all of them are there, and all are updated behind the loop.
    assert len(stacks_of_gradients(graph)) == (3 * len(sizes["widths"]) if metric else 0)


def test_two_loops_over_the_same_parameters(x64: None) -> None:
    """A second loop adds to the gradients: the last of both updates, with the stack of the other."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(y @ w), None

        once, _ = jax.lax.scan(layer, x, p)
        twice, _ = jax.lax.scan(jax.checkpoint(layer), once, p)
        return jnp.mean(twice**2)

    def step(p: Any, m: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(loss)(p, x)
        m = 0.9 * m + g
        return p - 0.1 * m, m, value

    p = jax.random.normal(jax.random.key(0), (4, 3, 3), jnp.float64)
    graph = assert_same(step, (p, jnp.ones_like(p), jnp.ones((2, 3), jnp.float64)))
    loops = [op for op in graph.operators if op.primitive == "scan" and phase_of(op) == "backward"]
    assert [len(replaced_in_place(graph, op)) for op in loops] == [0, 2]
    assert len(stacks_of_gradients(graph)) == 1


@pytest.mark.parametrize(
    ("optimizer", "metric", "why"),
    [
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), "", "tree_norm"),
        (optax.adam(1e-2), "norm", "needs them whole"),
        (optax.adam(1e-2), "gradients", "the step returns them"),
    ],
)
def test_what_needs_all_gradients_is_refused(x64: None, optimizer: Any, metric: str, why: str) -> None:
    step, args = model(optimizer, metric=metric)
    plain, _ = traced(step, args)
    assert updated_in_backward(plain) is plain
    possible, note = update_in_backward(plain.graph)
    assert not possible and note.startswith("1.3 kB of gradients of stacks are kept") and why in note
    updates = backward_updates(plain.graph)
    assert len(updates.kept) == 3 and updates.note(plain.graph) == note


def test_a_parameter_that_is_read_afterwards_is_updated_behind_the_loop(x64: None) -> None:
    """Its stack cannot be written where it lies: others are."""
    step, args = model(optax.sgd(1e-2))

    def reporting(state: Any, tokens: jax.Array) -> Any:
        new, out = step(state, tokens)
        moved = new["params"]["embed"][0, 0] * state["params"]["layers"][0]["up"]
        return new, (out, moved)

    graph = assert_same(reporting, args)
    assert len(stacks_of_gradients(graph)) == 1
    possible, note = update_in_backward(traced(reporting, args)[0].graph)
    assert possible and "test_backward_update.py" in note


def test_a_step_without_stacks_is_left_as_it_is() -> None:
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda q: jnp.sum(jnp.tanh(x @ q)))(p)

    flat, _ = traced(step, (jnp.ones((3, 2)), jnp.ones((4, 3))))
    assert updated_in_backward(flat) is flat and update_in_backward(flat.graph) == (False, "")
