"""The intermediate representation: graphs, types and layouts, as plain data without jax."""

from autopar.ir.graph import ROLES, Attr, Graph, Input, Literal, Operand, Operator, Output, Value
from autopar.ir.layout import Layout, typed_text
from autopar.ir.types import TensorType, is_float, item_bytes

__all__ = [
    "ROLES",
    "Attr",
    "Graph",
    "Input",
    "Layout",
    "Literal",
    "Operand",
    "Operator",
    "Output",
    "TensorType",
    "Value",
    "is_float",
    "item_bytes",
    "typed_text",
]
