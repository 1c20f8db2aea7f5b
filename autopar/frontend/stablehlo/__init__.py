"""StableHLO modules, of any frontend, as functions that jax traces."""

from autopar.frontend.stablehlo.interpret import traced_module
from autopar.frontend.stablehlo.module import Argument, StablehloModule, read_module

__all__ = ["Argument", "StablehloModule", "read_module", "traced_module"]
