"""``python -m autopar``: the command without its script."""

from __future__ import annotations

from autopar.cli import main

main(prog_name="autopar")
