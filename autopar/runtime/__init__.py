"""Runs lowered programs."""

from autopar.runtime.local import LocalProgram, load_local
from autopar.runtime.pipeline import PipelineProgram, load_pipeline

__all__ = ["LocalProgram", "PipelineProgram", "load_local", "load_pipeline"]
