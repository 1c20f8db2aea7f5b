"""Prices of operators and collectives: seconds, FLOPs and bytes."""

from autopar.cost.attention import ATTENTIONS
from autopar.cost.collectives import (
    KINDS,
    all_reduce_tree_s,
    collective_matmul_s,
    collective_on_link_s,
    collective_s,
    tree_latency_s,
    wire_bytes,
)
from autopar.cost.compute import operator_bytes, operator_flops, product_flops, roofline_s, total_flops
from autopar.cost.constants import Numbers, StartPrices
from autopar.cost.convolutions import Convolution, convolution_of, is_dilated, met_share
from autopar.cost.kernels import KernelRates, Matrices, kernel_rates
from autopar.cost.model import CostModel
from autopar.cost.network import NetworkRates
from autopar.cost.orders import Reorder, packed, reorders, run_bytes
from autopar.cost.sends import lane_bandwidth, lane_s, least_latency_s, send_line, send_s
from autopar.cost.work import (
    PRODUCTS,
    Core,
    KernelWork,
    LeastWork,
    ProductDims,
    kind_of,
    matrices_of,
    product_dtype,
)

__all__ = [
    "ATTENTIONS",
    "KINDS",
    "PRODUCTS",
    "Convolution",
    "Core",
    "CostModel",
    "KernelRates",
    "KernelWork",
    "LeastWork",
    "Matrices",
    "NetworkRates",
    "Numbers",
    "ProductDims",
    "Reorder",
    "StartPrices",
    "all_reduce_tree_s",
    "collective_matmul_s",
    "collective_on_link_s",
    "collective_s",
    "convolution_of",
    "is_dilated",
    "kernel_rates",
    "kind_of",
    "lane_bandwidth",
    "lane_s",
    "least_latency_s",
    "matrices_of",
    "met_share",
    "operator_bytes",
    "operator_flops",
    "packed",
    "product_dtype",
    "product_flops",
    "reorders",
    "roofline_s",
    "run_bytes",
    "send_line",
    "send_s",
    "total_flops",
    "tree_latency_s",
    "wire_bytes",
]
