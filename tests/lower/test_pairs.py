"""The page that says which techniques go together has all pairs."""

from __future__ import annotations

from tests.lower import pairs
from tests.lower.test_techniques import MODELS, PAIRS, expected


def test_the_page_has_all_pairs() -> None:
    """As they are expected to be; `python -m tests.lower.pairs` writes what they are."""
    expectations = {(name, pair): expected(name, pair) for name in MODELS for pair in PAIRS}
    assert pairs.PAGE.read_text(encoding="utf-8") == pairs.written(pairs.table(expectations))
