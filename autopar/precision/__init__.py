"""Mixed precision of a plain float32 step: narrow products and activations, float32 parameters and updates."""

from autopar.precision.policy import DENIED, FOLLOWING, PRODUCTS, Precision, precision_of
from autopar.precision.rewrite import mixed

__all__ = ["DENIED", "FOLLOWING", "PRODUCTS", "Precision", "mixed", "precision_of"]
