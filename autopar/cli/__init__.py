"""The command ``autopar``. Commands are loaded when they are used, and only ``plan`` loads jax."""

from __future__ import annotations

from autopar.cli.group import LazyGroup

__all__ = ["main"]

main = LazyGroup(
    name="autopar",
    help=(
        "Automatic parallelization of JAX train steps.\n\n"
        "Results go to standard output, progress and messages to standard error. Exit code 0: done; 1: the request "
        "cannot be met; 2: wrong usage."
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
