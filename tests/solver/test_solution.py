"""Solutions hold plain numbers, which plans are written with."""

import numpy as np

from autopar.solver import Solution, Status


def test_numbers_of_numpy_become_plain_ones():
    answer = Solution(Status.FEASIBLE, (0,), np.float64(2.0), np.float64(1.0), 0.0, "any")
    assert (type(answer.objective), type(answer.lower_bound)) == (float, float)
