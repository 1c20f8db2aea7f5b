"""The program that a cluster runs belongs to it, to its text and to its parts."""

from autopar import Cluster


def test_the_stack_is_xla_unless_said_otherwise_and_stays_with_parts_and_text():
    plain, other = Cluster.load("dgx-a100"), Cluster.load("dgx-a100", nodes=2, stack="megatron")
    assert (plain.stack, other.stack) == ("xla", "megatron")
    assert other.part(0, 4).stack == "megatron"
    assert Cluster.from_json(other.to_json()) == other
    assert "stack" not in plain.to_dict()
    assert plain.content_hash != Cluster.load("dgx-a100", stack="megatron").content_hash
