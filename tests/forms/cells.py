"""Every primitive in every form and way as one list, and what came of each, which is kept in ``outcomes.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.forms.forms import FORMS, step_of
from tests.forms.functions import Found, all_found, covering
from tests.forms.ways import WAYS, outcome

KEPT = Path(__file__).with_name("outcomes.json")


@dataclass(frozen=True)
class Cell:
    """A function in a form, run in a way.

    Args:
        function: the function.
        form: a name in `FORMS`.
        way: a name in `WAYS`.
    """

    function: Found
    form: str
    way: str

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.function.name} | {self.form} | {self.way}"

    def outcome(self) -> str:
        """See `tests.forms.ways.outcome`."""
        return outcome(step_of(self.function, self.form), self.way)


def cells(functions: Sequence[Found] | None = None) -> list[Cell]:
    """Functions that bind every primitive, each in every form; ways take turns, so that all pairs of them occur.

    They are in a drawn order, always the same: the first ones are a sample of all.

    Args:
        functions: to take in place of those.
    """
    ways = list(WAYS)
    some = covering(list(all_found())) if functions is None else functions
    inorder = [Cell(f, form, ways[(n + k) % len(ways)]) for n, f in enumerate(some) for k, form in enumerate(FORMS)]
    return [inorder[n] for n in np.random.default_rng(16).permutation(len(inorder))]


def kept() -> dict[str, Any]:
    """What is kept: jax's version, primitives by function, outcomes by cell."""
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if found.get("jax") != jax.__version__:
        return {"jax": jax.__version__, "cells": 0, "primitives": {}, "outcomes": {}}
    return dict(found)


def keep(found: Mapping[str, Any]) -> None:
    """Writes what `kept` reads."""
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def run(some: Sequence[Cell], found: dict[str, Any]) -> Iterator[tuple[Cell, str]]:
    """Runs those that have no outcome yet, and notes the outcomes."""
    found["cells"] = len(some)
    for cell in some:
        if cell.name not in found["outcomes"]:
            said = cell.outcome()
            found["outcomes"][cell.name] = said.partition(":")[0]
            found["primitives"][cell.function.name] = sorted(cell.function.primitives)
            yield cell, said
