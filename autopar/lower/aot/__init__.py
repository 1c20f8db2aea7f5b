"""Compiling for devices that are not here: targets, the process that compiles, what comes back."""

from autopar.lower.aot.base import Target
from autopar.lower.aot.compare import compare
from autopar.lower.aot.registry import TARGETS, parse_target, target_of
from autopar.lower.aot.spawn import compile_for
from autopar.lower.aot.verification import Verification

__all__ = ["TARGETS", "Target", "Verification", "compare", "compile_for", "parse_target", "target_of"]
