"""What operators and collectives cost: seconds, FLOPs and bytes."""

from autopar.cost.collectives import (
    KINDS,
    all_reduce_tree_s,
    collective_on_link_s,
    collective_s,
    tree_latency_s,
    wire_bytes,
)
from autopar.cost.compute import operator_bytes, operator_flops, roofline_s
from autopar.cost.model import CostModel

__all__ = [
    "KINDS",
    "CostModel",
    "all_reduce_tree_s",
    "collective_on_link_s",
    "collective_s",
    "operator_bytes",
    "operator_flops",
    "roofline_s",
    "tree_latency_s",
    "wire_bytes",
]
