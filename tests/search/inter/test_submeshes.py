"""Submeshes of stages that together are all devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import Cluster
from autopar.search.pipeline.candidates import _filling
from autopar.search.pipeline.partition import Submesh, submeshes

SUBMESHES = st.builds(Submesh, st.integers(0, 1), st.integers(1, 4))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=2).map(tuple),
    st.lists(SUBMESHES, min_size=1, max_size=4, unique=True),
    st.integers(0, 4),
)
def test_they_are_all_sequences_that_take_all_devices(left: tuple[int, int], kinds: list[Submesh], stages: int) -> None:
    want = [
        some
        for some in itertools.product(kinds, repeat=stages)
        if all(sum(k.size for k in some if k.group == g) == n for g, n in enumerate(left))
    ]
    assert list(_filling(left, kinds, stages)) == want


def test_those_of_a_large_cluster_are_found_without_all_beginnings() -> None:
    class Counted(tuple[Submesh, ...]):
        passes = 0

        def __iter__(self) -> Iterator[Submesh]:
            Counted.passes += 1
            return super().__iter__()

    kinds = Counted(submeshes(Cluster.load("p3.16xlarge", nodes=512)))
    assert len(list(_filling((4096,), kinds, 6))) == 525
    assert Counted.passes < 5_000  # 24,000 beginnings of six
