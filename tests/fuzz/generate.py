"""Random programs, each from a seed and a number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.fuzz.draw import Draw, Rejected
from tests.fuzz.operators import OPERATORS
from tests.fuzz.program import MODES, Program

_MODE_WEIGHTS = (2.0, 3.0, 2.0, 1.5, 1.0, 1.0, 1.5, 0.5, 0.5)


def generate(seed: int, index: int, dtype: str = "float64") -> Program:
    """Program number ``index`` of ``seed`` that computes in ``dtype``: always the same."""
    rng = np.random.default_rng((seed, index))
    draw = Draw(rng, dtype)
    draw.input("float", draw.shape(1, 3))
    names = sorted(OPERATORS)
    weights = np.array([OPERATORS[n][0] for n in names])
    # Each program has its favourites, so that operators meet that are rare together.
    weights = weights * rng.choice([0.2, 1.0, 5.0], len(names))
    count = int(rng.integers(3, 10))
    for _ in range(count * 5):
        if len(draw.statements[0]) >= count:
            break
        try:
            OPERATORS[str(rng.choice(names, p=weights / weights.sum()))][1](draw)
        except (Rejected, ValueError, ZeroDivisionError):  # the latter of dims of size 0
            continue
    values = [n for s in draw.statements[0] for n, t in s.targets]
    read = {n for s in draw.statements[0] for n in s.reads()}
    ends = [n for n in values if n not in read] or values[-1:]
    more = [n for n in values if n in read and rng.random() < 0.15]
    mode = str(rng.choice(MODES, p=np.array(_MODE_WEIGHTS) / sum(_MODE_WEIGHTS)))
    inputs, statements = tuple(draw.inputs), tuple(draw.statements[0])
    program = Program(inputs, statements, tuple(ends + more), mode, index % 1000, dtype).pruned()
    return program if program.params else replace(program, mode="forward")
