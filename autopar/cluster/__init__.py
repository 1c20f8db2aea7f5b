"""Clusters: devices, nodes and links; their files; and the logical meshes that a plan may use."""

from autopar.cluster.catalog import available
from autopar.cluster.cluster import Cluster
from autopar.cluster.device import COEFFICIENTS, ConvolutionForm, ConvolutionKind, ConvolutionRate, Curve, Device
from autopar.cluster.group import LinkSpec, MeasuredCollective, NodeGroup
from autopar.cluster.mesh import Link, LogicalMesh, Span
from autopar.cluster.stack import AdjustedStack

__all__ = [
    "COEFFICIENTS",
    "AdjustedStack",
    "Cluster",
    "ConvolutionForm",
    "ConvolutionKind",
    "ConvolutionRate",
    "Curve",
    "Device",
    "Link",
    "LinkSpec",
    "LogicalMesh",
    "MeasuredCollective",
    "NodeGroup",
    "Span",
    "available",
]
