"""Running lowered programs: on this process's devices."""

from autopar.runtime.local import LocalProgram, load_local

__all__ = ["LocalProgram", "load_local"]
