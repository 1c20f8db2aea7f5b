"""The example that adds a strategy: it is short, it runs, and it is ranked with the others."""

from __future__ import annotations

import importlib
import inspect

import autopar.search.registry as registry
from autopar.search import strategies
from examples import add_a_strategy as example
from examples import mlp


def test_it_is_short_and_ranked(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", registry.built_in())
    importlib.reload(example)  # registers it in this test's registry
    assert "descent" in strategies()
    written = inspect.getsource(example.descend) + inspect.getsource(example.descent)
    assert written.count("\n") < 50
    found = example.ranking(mlp, steps=3000, seeds=(0, 1))
    by_name = {s.strategy: s for s in found.ranking()}
    assert by_name["alpa"].place == 1
    assert len(by_name["descent"].step_times) == 2
    best = {t.strategy: min(x.curve[-1][1] for x in found.trials if x.strategy == t.strategy) for t in found.trials}
    assert best["alpa"] * (1 - 1e-9) <= best["descent"] < best["random"]
    source = inspect.getsource(example)
    assert source.count("# %%") >= 6
