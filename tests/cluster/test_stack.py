"""The program that a cluster runs belongs to it, to its text and to its parts."""

import re

import pytest

from autopar import AutoparError, Cluster
from autopar.cluster import AdjustedStack
from autopar.cost import CostModel
from autopar.errors import ClusterError


def test_the_stack_is_xla_unless_said_otherwise_and_stays_with_parts_and_text():
    plain, other = Cluster.load("dgx-a100"), Cluster.load("dgx-a100", nodes=2, stack="megatron")
    assert (plain.stack, other.stack) == ("xla", "megatron")
    assert other.part(0, 4).stack == "megatron"
    assert Cluster.from_json(other.to_json()) == other
    assert "stack" not in plain.to_dict()
    assert plain.content_hash != Cluster.load("dgx-a100", stack="megatron").content_hash


def test_a_stack_with_constants_of_its_own_stays_with_parts_and_text():
    stack = AdjustedStack("megatron", (("stacks.megatron.wait_s", 2e-4), ("kernels.half_depth", 300)))
    assert stack.constants == (("kernels.half_depth", 300.0), ("stacks.megatron.wait_s", 2e-4))
    cluster = Cluster.load("dgx-a100", nodes=2, stack=stack)
    assert cluster.part(0, 4).stack == cluster.with_nodes(1).stack == stack
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.content_hash != Cluster.load("dgx-a100", nodes=2, stack="megatron").content_hash


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        (lambda: AdjustedStack("", ()), "stack.name is ''"),
        (lambda: AdjustedStack("megatron", (("kernels.half_depth", -1.0),)), "kernels.half_depth is -1.0"),
        (lambda: AdjustedStack("megatron", (("kernels.half_depth", float("nan")),)), "kernels.half_depth is nan"),
        (lambda: Cluster.load("dgx-a100", stack={"name": "megatron"}), "stack is {'name': 'megatron'}"),
        (lambda: Cluster.load("dgx-a100", stack=3), "stack is 3"),
    ],
)
def test_what_is_no_stack_is_refused(stack, what):
    with pytest.raises(ClusterError, match=re.escape(what)):
        stack()


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("kernels.half_deep", 1.0, "no number of constants.toml is called 'kernels.half_deep'"),
        ("stacks.megatron.fused_attention", 1.0, "is called 'stacks.megatron.fused_attention'"),
        ("half_depth", 1.0, "is called 'half_depth'"),
        ("kernels.memory_share", 2.0, "<= 1.0"),
    ],
)
def test_a_constant_that_there_is_not_is_refused_where_it_is_looked_up(key, value, what):
    cluster = Cluster.load("dgx-a100", stack=AdjustedStack("megatron", ((key, value),)))
    with pytest.raises(AutoparError, match=re.escape(what)):
        CostModel(cluster)
