"""Classes of primitives: names that jax has, and none that is in two classes which exclude each other."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from autopar.frontend.build import build_graph
from autopar.ir import primitives
from autopar.ir.primitives import is_fusible

CLASSES = {name: value for name, value in vars(primitives).items() if isinstance(value, frozenset)}
#: Names of autopar's own, of jax before 0.10.2 and after it.
OTHERS = {
    "constant",
    "custom_call",
    "expand_dims",
    "log2",
    "one_minus_square",
    "ragged_dot",
    "roll",
    "stage_boundary",
    "wire",
}


def names_of_jax() -> set[str]:
    import jax._src.lax.lax
    import jax.experimental.pallas
    import jax.scipy.linalg  # noqa: F401

    gc.unfreeze()  # the collector does not tell of what tests/conftest.py has frozen
    # `isinstance` asks a weak proxy for the class of an object that may be gone: `type` asks nothing of it.
    return {p.name for p in gc.get_objects() if issubclass(type(p), Primitive)}


@pytest.mark.slow
def test_every_name_is_one_of_jax() -> None:
    known = names_of_jax() | OTHERS
    assert {name: sorted(names - known) for name, names in CLASSES.items() if names - known} == {}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["add", "min", "max", "multiply"])
def test_scatters_are_not_fused(name: str) -> None:
    def update(x: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        return getattr(x.at[at], name)(values)

    closed = jax.make_jaxpr(update)(jnp.zeros(8), jnp.zeros(3, int), jnp.zeros(3))
    (op,) = (op for op in build_graph(closed, "f").graph.operators if op.primitive.startswith("scatter"))
    assert not is_fusible(op)
