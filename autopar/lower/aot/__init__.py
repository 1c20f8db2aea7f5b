"""Compiling for devices that are not here: targets, the process that compiles, what comes back."""

from autopar.lower.aot.base import Target
from autopar.lower.aot.compare import compare
from autopar.lower.aot.pipeline_verification import PipelineVerification, compare_stages
from autopar.lower.aot.plans import check_size, compiled_plan
from autopar.lower.aot.registry import TARGETS, parse_target, target_of
from autopar.lower.aot.spawn import compile_for
from autopar.lower.aot.stages import compile_stages
from autopar.lower.aot.verification import Verification

__all__ = [
    "TARGETS",
    "PipelineVerification",
    "Target",
    "Verification",
    "check_size",
    "compare",
    "compare_stages",
    "compile_for",
    "compile_stages",
    "compiled_plan",
    "parse_target",
    "target_of",
]
