"""Ways of planning are tried in order; the error is that of the way that came nearest."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.search.attempts import Attempts

NEEDED = {(1, "none"): 90, (2, "none"): 50, (4, "full"): 20}


def attempts(limit_bytes, tried):
    def attempt(count, level, cutoff_s, explain):
        tried.append((count, level))
        if count == 3:
            raise MicrobatchError("3 microbatches do not divide the batch")
        if NEEDED[count, level] > limit_bytes:
            raise InfeasiblePlanError(f"{NEEDED[count, level]} bytes would do", least_bytes=NEEDED[count, level])
        return NEEDED[count, level]

    return Attempts(attempt)


def test_the_first_that_fits_is_taken():
    tried = []
    assert attempts(60, tried).first(NEEDED) == 50
    assert tried == [(1, "none"), (2, "none")]


def test_the_error_says_how_the_least_memory_would_do():
    made = attempts(10, [])
    assert made.first(NEEDED) is None
    with pytest.raises(InfeasiblePlanError, match="20 bytes would do, in 4 microbatches with remat='full'") as caught:
        raise made.error()
    assert caught.value.least_bytes == 20


def test_counts_that_are_impossible_are_not_tried_again():
    tried = []
    made = attempts(10, tried)
    assert made.first([(3, "none"), (3, "full")]) is None
    assert tried == [(3, "none")]
    assert made.possible([1, 2, 3]) == [1, 2]
    assert isinstance(made.error(), MicrobatchError)


def test_where_the_nearest_fits_when_it_is_asked_again_the_first_answer_is_told():
    """As with a strategy that the clock stopped."""

    def attempt(count, level, cutoff_s, explain):
        if not explain:
            raise InfeasiblePlanError("nothing was found in time", least_bytes=90)
        return 90

    made = Attempts(attempt)
    assert made.first([(2, "none")]) is None
    assert str(made.error()).startswith("nothing was found in time, in 2 microbatches")
