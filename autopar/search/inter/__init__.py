"""Pipelines: slicing a step into stages on submeshes by dynamic programming (Alpa, OSDI'22, section 5).

`costs` composes the costs of runs of layers from plans of the whole
model; `dp` slices; `stages` plans the chosen stages exactly; `pipeline` puts it together.
"""

from autopar.search.inter.pipeline import pipeline

__all__ = ["pipeline"]
