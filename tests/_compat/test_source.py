"""What jax notes of an equation: whether it is computed again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jax._src.source_info_util import Scope, Transform

from autopar._compat.source import is_recomputed

AGAIN = Scope("rematted_computation")


@pytest.mark.parametrize(
    ("stack", "again"),
    [
        ([], False),
        ([AGAIN], True),
        ([Scope("mine"), AGAIN], False),
        ([Transform("jvp")], False),
        ([Transform("transpose"), Transform("jvp"), AGAIN], True),
        ([Transform("transpose"), Scope("mine"), AGAIN], False),
        ([Scope("mine"), Transform("jvp"), AGAIN, Scope("mine")], True),
        ([Transform("jvp"), AGAIN, Transform("vmap")], False),
    ],
)
def test_the_scope_of_a_remat_stands_directly_behind_the_transformations(stack: list[object], again: bool) -> None:
    info = SimpleNamespace(name_stack=SimpleNamespace(stack=tuple(stack)))
    assert is_recomputed(info) is again
