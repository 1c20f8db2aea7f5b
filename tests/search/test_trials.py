"""Ways of planning are tried in order; the error is that of the way that came nearest."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.plan import StepForm
from autopar.search.outcome import Bounded
from autopar.search.trials import Trials

NEEDED = {StepForm(1, "none"): 90, StepForm(2, "none"): 50, StepForm(4, "full"): 20}


def trials(limit_bytes, tried):
    def attempt(configuration, cutoff_s, explain):
        tried.append((configuration.count, configuration.remat))
        if configuration.count == 3:
            raise MicrobatchError("3 microbatches do not divide the batch")
        needed = NEEDED[configuration]
        if needed > limit_bytes:
            raise InfeasiblePlanError(f"{needed} bytes would do", least_bytes=needed)
        return needed

    return Trials(attempt)


def test_the_first_that_fits_is_taken():
    tried = []
    assert trials(60, tried).first(NEEDED) == 50
    assert tried == [(1, "none"), (2, "none")]


def test_the_error_says_how_the_least_memory_would_do():
    made = trials(10, [])
    assert made.first(NEEDED) is None
    with pytest.raises(InfeasiblePlanError, match="20 bytes would do, in 4 microbatches with remat='full'") as caught:
        raise made.error()
    assert caught.value.least_bytes == 20


def test_counts_that_are_impossible_are_not_tried_again():
    tried = []
    made = trials(10, tried)
    assert made.first([StepForm(3, "none"), StepForm(3, "full")]) is None
    assert tried == [(3, "none")]
    assert made.possible([1, 2, 3]) == [1, 2]
    assert isinstance(made.error(), MicrobatchError)


def test_where_the_nearest_fits_when_it_is_asked_again_the_first_answer_is_told():
    """As with a strategy that the clock stopped."""

    def attempt(configuration, cutoff_s, explain):
        if not explain:
            raise InfeasiblePlanError("nothing was found in time", least_bytes=90)
        return 90

    made = Trials(attempt)
    assert made.first([StepForm(2, "none")]) is None
    assert str(made.error()).startswith("nothing was found in time, in 2 microbatches")


def test_each_is_given_the_seconds_of_the_fastest_before():
    seconds = {StepForm(1, "none"): 3.0, StepForm(2, "none"): 5.0, StepForm(4, "none"): 2.0, StepForm(8, "none"): 1.0}
    given = []

    def attempt(configuration, cutoff_s, explain):
        given.append(cutoff_s)
        if seconds[configuration] >= cutoff_s:
            return Bounded("not faster")
        return seconds[configuration]

    assert Trials(attempt).run(seconds, seconds=float, cutoff_s=4.0) == [3.0, 2.0, 1.0]
    assert given == [4.0, 3.0, 3.0, 2.0]
    assert Trials(attempt).run(seconds, seconds=float, ends=lambda s: s < 2.5) == [3.0, 2.0]
    assert Trials(attempt).run(seconds, cutoff_s=2.5, ends_when_slower=True) == []


@pytest.mark.parametrize("bounds", [(3.0, 5.0), (5.0, 3.0), (None, 3.0), (3.0, None)])
def test_what_closed_all_of_them_is_the_least(bounds):
    """None of the region is told to take longer than the fastest of it might."""
    least = iter(bounds)
    made = Trials(lambda configuration, cutoff_s, explain: Bounded("its bound", next(least)))
    assert made.run([StepForm(1, "none"), StepForm(2, "none")]) == []
    assert made.bounded == Bounded("its bound", None if None in bounds else 3.0)
