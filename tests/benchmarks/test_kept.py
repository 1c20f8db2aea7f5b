"""Bills of published runs on disk: what is read is what was made, and a second process makes none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autopar._compat.files import CACHE_VARIABLE
from autopar.cluster import Cluster
from benchmarks.published import kept
from benchmarks.published.plans import shape_of, stage_cluster
from benchmarks.published.transformer import TrainingPlan, TransformerSpec

SPEC = TransformerSpec(layers=2, hidden=64, heads=4, seq=32, vocab=128)
SHAPE = shape_of(SPEC, TrainingPlan(8, 1, tp=2))
CLUSTER = stage_cluster(Cluster.load("dgx-a100"), 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kept.bill.cache_clear()
    yield tmp_path / "bills"
    kept.bill.cache_clear()


@pytest.mark.slow
def test_a_bill_is_made_once(folder, monkeypatch):
    whole = kept.bill(SHAPE, CLUSTER)
    kept.bill.cache_clear()
    monkeypatch.setattr(kept, "make_bill", None)
    again = kept.bill(SHAPE, CLUSTER)
    assert again.bill is not whole.bill
    assert (again.layer, again.ends) == (whole.layer, whole.ends)
    assert again.bill.messages == whole.bill.messages
    assert len(again.bill.kernels) == len(whole.bill.kernels) > 100
    for a, b in zip(again.bill.kernels, whole.bill.kernels, strict=True):
        assert dataclasses.replace(a, product=None) == dataclasses.replace(b, product=None)
        sizes = [None if k.product is None else dataclasses.astuple(k.product) for k in (a, b)]
        assert sizes[0] == sizes[1] or np.array_equal(*sizes)
    assert kept.make_missing([(SHAPE, CLUSTER)]) == 0


@pytest.mark.slow
def test_another_shape_is_another_file(folder):
    kept.bill(SHAPE, CLUSTER)
    other = dataclasses.replace(SHAPE, microbatch=2)
    assert kept.make_missing([(other, CLUSTER), (SHAPE, CLUSTER)]) == 1
    kept.bill(other, CLUSTER)
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_kept_where_that_is_turned_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert kept.make_missing([(SHAPE, CLUSTER)]) == 0
