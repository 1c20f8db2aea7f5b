from __future__ import annotations

from pathlib import Path

import pytest

from tests.turned import turned

HERE = Path(__file__).parent


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_process_collects_all_tests_and_begins_elsewhere(count: int) -> None:
    orders = [turned(HERE, number, count) for number in range(count)]
    assert len({order[0] for order in orders}) == count
    for order in orders:
        found = [f for p in map(Path, order) for f in ([p] if p.is_file() else p.rglob("test_*.py"))]
        assert sorted(found) == sorted(HERE.rglob("test_*.py"))
