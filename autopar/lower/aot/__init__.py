"""Compiling for devices that are not here: targets, the process that compiles, what comes back."""

from autopar.lower.aot.base import Target
from autopar.lower.aot.pipeline_verification import (
    PipelineVerification,
    check_size,
    compare_stages,
    compile_stages,
    compiled_plan,
)
from autopar.lower.aot.registry import TARGETS, parse_target, target_of
from autopar.lower.aot.spawn import compile_for
from autopar.lower.aot.verification import Verification, compare

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
