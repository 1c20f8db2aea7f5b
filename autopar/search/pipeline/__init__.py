"""Pipelines: which slicings into stages are worth planning, the plan of each stage, and the plan of them together."""
