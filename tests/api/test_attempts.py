"""Ways of planning are tried in order; the error is that of the way that came nearest."""

from __future__ import annotations

import math

import pytest

from autopar.api.attempts import Attempts
from autopar.errors import InfeasiblePlanError, MicrobatchError

NEEDED = {(1, "none"): 90, (2, "none"): 50, (4, "full"): 20}


def attempts(limit_bytes, tried):
    def attempt(count, level, enough_s):
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


def test_more_microbatches_are_tried_as_long_as_they_are_faster():
    seconds = {1: None, 2: 9.0, 4: 5.0, 8: 6.0, 16: 1.0}
    tried = []

    def attempt(count, level, enough_s):
        tried.append((count, enough_s))
        if seconds[count] is None or seconds[count] >= enough_s:
            raise InfeasiblePlanError("too large, or too slow")
        return seconds[count]

    ways = [(count, "none") for count in seconds]
    assert Attempts(attempt).fastest_of_growing(ways, lambda s: False, lambda s: s) == 5.0
    assert tried == [(1, math.inf), (2, math.inf), (4, 9.0), (8, 5.0)]  # 16 would be worth more than it costs to find
    assert Attempts(attempt).fastest_of_growing(ways, lambda s: s == 9.0, lambda s: s) == 9.0
    assert Attempts(attempt).fastest_of_growing(ways[:1], lambda s: False, lambda s: s) is None

    def slow(count, level, enough_s):  # of strategies that do not look at what is enough
        return seconds[count] or 10.0

    assert Attempts(slow).fastest_of_growing(ways, lambda s: False, lambda s: s) == 5.0
