"""What devices wait for the host: each loop over layers by itself, apart from what is outside of them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.search.intra.program import ProgramCost, Works
from tests.search.problems import f32, graph_of

COST = CostModel(Cluster.load("dgx-a100", stack="megatron"))


def _layers(x, w):
    y, _ = lax.scan(lambda c, a: (jnp.tanh(c @ a), None), x, w)
    return jnp.exp(y @ w[0]).sum()


def _works():
    graph = graph_of(_layers, f32(8, 16), f32(4, 16, 16))
    (loop,) = (op for op in graph.operators if op.primitive == "scan")
    (inside,) = (op for op in loop.region("body").operators if op.primitive == "dot_general")
    (loss,) = (op for op in graph.operators if op.primitive == "exp")
    return Works(graph, COST), f"{loop.id}/body/{inside.id}", loss.id


def _stall_s(works, *rows):
    for id, device_s, host_s in rows:
        works.add(id, "forward", device_s)
        works.add_cost(ProgramCost(id, "forward", host_s, of="host"))
    return works.stall_s


def test_a_host_that_is_behind_in_layers_is_not_ahead_in_the_loss():
    works, layer, loss = _works()
    assert works.loops.layers(layer) and not works.loops.layers(loss)
    layers_s = COST.together_s(1.0, 3.0)
    assert _stall_s(works, (layer, 1.0, 3.0), (loss, 2.0, 0.0)) == pytest.approx(layers_s - 1.0)
    assert layers_s + 2.0 > COST.together_s(3.0, 3.0)  # what both take where the host may be ahead


def test_seconds_of_one_loop_are_taken_together():
    works, layer, _ = _works()
    assert _stall_s(works, (layer, 1.0, 1.5), (layer, 2.0, 0.5)) == pytest.approx(COST.together_s(3.0, 2.0) - 3.0)


def test_without_starts_nobody_waits():
    works, layer, loss = _works()
    assert _stall_s(works, (layer, 1.0, 0.0), (loss, 2.0, 0.0)) == 0
