from __future__ import annotations

import pytest

from autopar.lower.hlo import collectives, listed_groups


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", "{{0,1,2,3},{4,5,6,7}}"),
        ("mesh['a'=2,'b'=4] {'a'}", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("mesh['a'=8,'b'=1] {'a'}", "{{0,1,2,3,4,5,6,7}}"),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", "{{0,2},{1,3},{4,6},{5,7}}"),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "{{0,1},{2,3},{4,5},{6,7}}"),
        ("mesh['a'=4,'c'=1,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", "{{0,1,2,3},{4,5,6,7}}"),
    ],
)
def test_groups_of_mesh_axes_are_listed(written: str, groups: str) -> None:
    assert listed_groups(f"x, replica_groups={written}, y") == f"x, replica_groups={groups}, y"


@pytest.mark.slow
def test_groups_of_mesh_axes_are_read() -> None:
    text = (
        "HloModule m, num_partitions=8\n\nENTRY main {\n  p = f32[4]{0} parameter(0)\n"
        "  ROOT r = f32[4]{0} all-reduce(p), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=sum\n}\n"
    )
    (found,) = collectives(text)
    assert (found.group_size, found.full_bytes) == (4, 16)
