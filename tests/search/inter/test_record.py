"""The record of a pipeline: what its works read and write can be put into an order."""

from __future__ import annotations

import pytest

import autopar
from autopar.lower.aot import parse_target
from autopar.schedule import parse_table
from examples import gpt


@pytest.mark.slow
def test_no_forward_pass_reads_what_a_later_stage_makes() -> None:
    # Cuts are inside of layers: masks are made in each stage that reads them.
    step, args = gpt.build(
        "tiny", abstract=True, layers=2, hidden=512, heads=8, vocab=4096, seq=256, batch=64, dtype="bfloat16"
    )
    cluster = parse_target("cpu:8").cluster()
    plan = autopar.parallelize(step, cluster=cluster, num_stages=8, num_microbatches=4).plan(*args)
    record = plan.content.pipeline
    assert record is not None and parse_table(record.table).num_stages == 8
    written = {name: w.stage for w in record.works for name in w.writes if w.kind == "forward"}
    later = [(w.kind, w.stage, n) for w in record.works for n in w.reads if written.get(n, w.stage) > w.stage]
    # A stage after the last product may be empty: no cut makes the longest stage shorter.
    *sending, _ = (s for s, stage in enumerate(plan.content.stages) if stage.operators)
    earlier = {written[n] for w in record.works for n in w.reads if written.get(n, w.stage) < w.stage}
    assert earlier == set(sending) and len(sending) > 4
    assert all(kind == "backward" for kind, _, _ in later)
