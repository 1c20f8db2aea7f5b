"""PROVISIONAL"""
from autopar.ir.graph import Graph
def verify(graph: Graph) -> None:
    return None
