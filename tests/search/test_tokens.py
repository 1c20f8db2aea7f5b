"""Which dims of the batch are of tokens, and what the devices that share them may hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout
from autopar.search.batch_dims import SharedTokens, check_tokens, token_dims
from examples import gpt, llama, mlp, moe, wide_resnet
from tests.search.problems import f32, graph_of, i32


def of_batch(graph):
    dims = token_dims(graph)
    return {i.name: dims.get(i.name) for i in graph.inputs if i.role == "batch"}


@pytest.mark.few(2)
@pytest.mark.parametrize("build", [gpt.build, llama.build, moe.build])
def test_texts_have_tokens(build):
    graph = graph_of(*_split(build(abstract=True)))
    assert of_batch(graph) == {"batch['tokens']": 1, "batch['labels']": 1}


@pytest.mark.parametrize("build", [mlp.build, wide_resnet.build])
def test_features_and_pixels_are_no_tokens(build):
    graph = graph_of(*_split(build(abstract=True)))
    assert set(of_batch(graph).values()) == {None}
    with pytest.raises(InfeasiblePlanError, match="no tokens that cp=2 devices can share"):
        check_tokens(graph, token_dims(graph), 2)


@pytest.mark.slow
def test_what_meets_tokens_is_of_tokens_and_the_first_of_several_dims_is_taken():
    graph = graph_of(*_split(gpt.build(abstract=True, masked=True)))
    assert of_batch(graph)["batch['mask']"] == 1
    dims = token_dims(graph)
    scores = next(v for op in graph.operators if "bqhd" in op.id for v in op.results)
    assert scores.type.shape[2:] == (16, 16)
    assert dims[scores.name] == 2


def attending(params, source, target, seen, goal):
    """Targets look at sources through a mask; the goal is a class an example and one-hot."""

    def loss(params):
        q, k = target @ params["q"], source @ params["k"]
        scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
        mixed = jax.nn.softmax(scores) @ source
        return jnp.mean(jnp.square(jnp.mean(mixed @ params["v"], axis=1) - goal))

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_two_texts_have_tokens_each():
    params = {"q": f32(12, 16), "k": f32(12, 16), "v": f32(12, 10)}
    batch = (f32(4, 6, 12), f32(4, 8, 12), jax.ShapeDtypeStruct((4, 8, 6), jnp.bool_), f32(4, 10))
    graph = graph_of(attending, params, *batch)
    assert of_batch(graph) == {"source": 1, "target": 1, "seen": 1, "goal": None}
    check_tokens(graph, token_dims(graph), 2)
    with pytest.raises(InfeasiblePlanError, match=r"source f32\[4,6,12\] has 6 tokens an example.*cp=4 devices"):
        check_tokens(graph, token_dims(graph), 4)


def test_a_bag_of_words_has_no_tokens():
    def step(table, w, words):
        def loss(table, w):
            return jnp.mean(jnp.sum(table[words], axis=1) @ w)

        grads = jax.grad(loss, argnums=(0, 1))(table, w)
        return table - grads[0], w - grads[1]

    assert of_batch(graph_of(step, f32(32, 8), f32(8, 4), i32(4, 6))) == {"words": None}


def test_layouts_of_values_inside_loops():
    graph = graph_of(*_split(llama.build(abstract=True)))
    shared = SharedTokens.of(graph, {"batch['tokens']": 1, "batch['labels']": 1}, "y")
    product, scores = "jvp()/scan.0/body/dot_general.0", "jvp()/scan.0/body/bqhd,bshd->bhqs/dot_general.0"
    layouts = [Layout.parse(t) for t in ("[x,y,.]", "[x,.,y]", "[y,.,.]", "[x,.,.]")]
    assert shared.allowed(product, layouts) == [True, False, False, False]
    assert shared.allowed(product, layouts[1:]) == [True, False, True]  # where tokens cannot be split
    heads = [Layout.parse(t) for t in ("[x,.,y,.]", "[x,y,.,.]", "[y,x,.,.]")]
    assert shared.allowed(scores, heads) == [True, True, False]


def test_what_is_not_of_the_batch_may_lie_anyhow():
    graph = graph_of(*_split(gpt.build(abstract=True, layers=1)))
    shared = SharedTokens.of(graph, {"batch['tokens']": 1}, "y")
    assert shared.allowed("unknown", [Layout.parse("[y,.]"), Layout.parse("[.,.]")]) == [True, True]


def _split(built):
    fn, args = built
    return fn, *args
