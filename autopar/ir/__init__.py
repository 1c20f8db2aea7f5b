"""The intermediate representation: graphs, types and layouts, as plain data without jax."""

from autopar.ir.fingerprint import fingerprint, structural_hash
from autopar.ir.graph import ROLES, Attr, Graph, Input, Literal, Operand, Operator, Output, Value
from autopar.ir.layout import Layout
from autopar.ir.text import GraphSyntaxError, graph_text, operator_text, parse_graph
from autopar.ir.types import TensorType, is_float, item_bytes
from autopar.ir.verify import GraphError, verify

__all__ = [
    "ROLES",
    "Attr",
    "Graph",
    "GraphError",
    "GraphSyntaxError",
    "Input",
    "Layout",
    "Literal",
    "Operand",
    "Operator",
    "Output",
    "TensorType",
    "Value",
    "fingerprint",
    "graph_text",
    "is_float",
    "item_bytes",
    "operator_text",
    "parse_graph",
    "structural_hash",
    "verify",
]
