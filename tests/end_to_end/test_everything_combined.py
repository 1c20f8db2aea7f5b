"""Precision, wire formats, host memory, stages and schedules together: drawn cells, each equal to its own oracle.

What changes values (precision, scaled losses) is done by the pure transforms on one device, what is sent in few bits is
within its bound, and all else is exact: float64 where nothing narrow is in the cell.
"""

from __future__ import annotations

import collections

import pytest

from autopar import ConstraintError
from tests.end_to_end.combined import (
    MICROBATCHES,
    MODELS,
    OFFLOADS,
    PRECISIONS,
    SCHEDULES,
    STAGES,
    WIRES,
    Cell,
    compared,
    drawn_cells,
)

CELLS = drawn_cells(22, 100)
#: Those of at most a few seconds, of every model, precision, wire, place and number of stages.
QUICK = [CELLS[n] for n in (4, 7, 13, 17, 33, 39, 48, 53, 63, 79, 95, 98)]

#: Stages of two devices each, which alone can hold its constraint, are not among the slicings that are tried.
NOT_SPLIT = CELLS[94]


def check(cell: Cell) -> None:
    plan, found = compared(cell)
    assert cell.schedule == "branches" or (plan.num_stages, plan.num_microbatches) == (cell.stages, cell.microbatches)
    far = [f"{leaf.path}: {leaf.error:.1e} > {leaf.allowed:.1e}" for leaf in found if not leaf.error <= leaf.allowed]
    assert not far, far
    if cell.stages == 1 and cell.offload in ("layers", "update"):
        assert plan.stages[0].host_bytes > 0


#: One with half precision, 8-bit wires, two stages and a constraint; one with layers in host memory.
DEFAULT = (QUICK[0], QUICK[6])


@pytest.mark.parametrize(
    "cell", [*DEFAULT, *(pytest.param(c, marks=pytest.mark.slow) for c in QUICK if c not in DEFAULT)], ids=str
)
def test_a_cell_equals_its_oracle(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_cell_equals_its_oracle(cell):
    if cell == NOT_SPLIT:
        with pytest.raises(ConstraintError, match="cannot hold on any of the meshes"):
            check(cell)
        return
    check(cell)


def test_the_cells_have_every_value_of_every_part():
    assert len(set(CELLS)) == 100
    values = (MODELS, PRECISIONS, WIRES, OFFLOADS, STAGES, SCHEDULES, MICROBATCHES, (False, True))
    fields = ("model", "precision", "wire", "offload", "stages", "schedule", "microbatches", "split")
    for field, every in zip(fields, values, strict=True):
        drawn = collections.Counter(getattr(cell, field) for cell in CELLS)
        assert set(drawn) == set(every)
        assert min(drawn.values()) >= 3, (field, drawn)
