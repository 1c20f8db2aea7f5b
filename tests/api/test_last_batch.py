"""The last batch of a data set has fewer examples."""

from __future__ import annotations

import logging

import pytest

import autopar
from autopar import MicrobatchError
from autopar.api.batches import counts_for
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same


@pytest.mark.parametrize(("size", "asked", "counts"), [(6, 4, [3, 6]), (7, 4, [1, 7]), (2, 4, [2]), (12, 8, [6, 12])])
def test_fewer_first_then_more(size, asked, counts):
    assert counts_for(size, asked) == counts


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"num_stages": 2}])
def test_a_last_batch_that_the_microbatches_do_not_divide(options, caplog):
    step = autopar.parallelize(sgd, cluster=CLUSTER, num_microbatches=4, **options)
    with caplog.at_level(logging.WARNING, "autopar"):
        for size in (16, 6, 10, 16):
            assert_trees_same(step(params(), batch(size)), sgd(params(), batch(size)))
    assert [step.plan(params(), batch(size)).num_microbatches for size in (16, 6, 10)] == [4, 3, 2]
    (said,) = [r.getMessage() for r in caplog.records if r.name == "autopar"]
    assert "4 microbatches do not divide a batch of 6" in said and "runs in 3" in said


def test_a_first_batch_that_the_microbatches_do_not_divide_is_an_error():
    with pytest.raises(MicrobatchError, match="4 microbatches do not divide the batch of 6"):
        autopar.parallelize(sgd, cluster=CLUSTER, num_microbatches=4)(params(), batch(6))
