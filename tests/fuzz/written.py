"""Failing programs as pytest files."""

from __future__ import annotations

from tests.fuzz.check import Config
from tests.fuzz.program import Program, source

_FILE = '''"""Found by fuzzing: {title}."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.fuzz.check import assert_program
from tests.fuzz.support import *
from tests.fuzz.support import argument

__all__ = ["jax", "jnp"]


{source}

def arguments():
    params = ({params})
    moments = ({moments})
    data = ({data})
    return params, moments, data


def test_it():
    with jax.enable_x64(True):
        args = arguments()
    assert_program(step, args, {config}{dtype})
'''


def _inputs(pairs: list[tuple[str, tuple[int, ...], int]], dtype: str) -> str:
    last = "" if dtype == "float64" else f", {dtype!r}"
    return "".join(f"argument({kind!r}, {shape}, {seed}{last}), " for kind, shape, seed in pairs)


def as_test(program: Program, config: Config, title: str) -> str:
    """The text of a test that runs ``program`` planned with ``config``.

    Args:
        program: what failed.
        config: the plan that it failed with.
        title: what went wrong, in a line.
    """
    lead = (8,) if program.mode in ("vmap", "per_example") else ()
    params = [(t.kind, (lead if n == 0 else ()) + t.shape, program.seed + n) for n, (_, t) in enumerate(program.params)]
    moments = ""
    if program.mode == "adam":
        groups = [
            _inputs([(t.kind, t.shape, program.seed + k + n) for n, (_, t) in enumerate(program.params)], program.dtype)
            for k in (100, 200)
        ]
        moments = f"({groups[0]}), ({groups[1]})"
    data = [(t.kind, t.shape, program.seed + 50 + n) for n, (_, t) in enumerate(program.data)]
    return _FILE.format(
        title=title,
        source=source(program),
        params=_inputs(params, program.dtype),
        moments=moments,
        data=_inputs(data, program.dtype),
        config=config,
        dtype="" if program.dtype == "float64" else f", dtype={program.dtype!r}",
    )
