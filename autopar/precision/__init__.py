"""Mixed precision of a plain float32 step, and the formats in which weights and gradients are sent."""

from autopar.precision.delayed_scaling import DelayedScaling, EightBitState, delayed_scaling
from autopar.precision.policy import DENIED, FOLLOWING, PRODUCTS, Precision, precision_of
from autopar.precision.rewrite import mixed
from autopar.precision.wire import Wire, wire_of, with_formats

__all__ = [
    "DENIED",
    "FOLLOWING",
    "PRODUCTS",
    "DelayedScaling",
    "EightBitState",
    "Precision",
    "Wire",
    "delayed_scaling",
    "mixed",
    "precision_of",
    "wire_of",
    "with_formats",
]
