"""Stages that are the same but for names are formed, and looked at, once."""

from __future__ import annotations

import autopar
from autopar.plan import StepForm
from autopar.recompute import LEVELS
from autopar.search.pipeline import stage as stage_module
from examples import gpt
from tests.search.inter.blocks import cut_into_blocks
from tests.search.problems import toy


def test_a_stage_is_formed_once():
    source, layers = cut_into_blocks(4)
    form = StepForm(4, LEVELS[-1])
    first, again = (source.in_form(layers.members, 2, form) for _ in range(2))
    assert again.graph is first.graph and again.origins is first.origins
    assert source.in_form(layers.members, 3, form).graph is not first.graph


def test_ways_to_pad_are_looked_for_once_for_isomorphic_stages(monkeypatch):
    asked = []
    padded_dims = stage_module.padded_dims
    monkeypatch.setattr(
        stage_module, "padded_dims", lambda question: (asked.append(question), padded_dims(question))[1]
    )
    fn, args = gpt.build("tiny", layers=8, scan=True, abstract=True)
    options = {"num_stages": 4, "num_microbatches": 4, "padding": True}
    plan = autopar.parallelize(fn, cluster=toy(8, nodes=4, bandwidth=1e7), donate_argnums=0, **options).plan(*args)
    assert plan.num_stages == 4
    graphs = {question.problem.graph.name.rpartition("/")[2] for question in asked}
    assert len(asked) == len(graphs) == 3, "the first stage, those in between, the last"
