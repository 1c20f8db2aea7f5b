"""Releases of jax whose programs are known to the byte: figures that were kept hold for them."""

from __future__ import annotations

import importlib.metadata

#: Others trace, merge and store a little otherwise: kept figures hold within a share that each test states.
KNOWN_JAX = importlib.metadata.version("jax").startswith("0.10.")


def tolerance(other: float, known: float = 1e-9) -> float:
    """How far a kept figure may be off: ``known`` with a known release of jax, ``other`` with another."""
    return known if KNOWN_JAX else other
