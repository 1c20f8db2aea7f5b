"""Running one primitive on one device's shards."""

from autopar.lower.localize.base import LocalContext, Localizer, run_unchanged
from autopar.lower.localize.registry import localize

__all__ = ["LocalContext", "Localizer", "localize", "run_unchanged"]
