"""What a compiled program says of itself."""

from __future__ import annotations

from typing import Any


def footprint_bytes(analysis: Any) -> int:
    """Bytes that a program needs on a device: arguments + outputs + temporaries - aliases.

    Args:
        analysis: jax's memory statistics of a compiled program. Its own peak leaves out temporaries on CPU.
    """
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
