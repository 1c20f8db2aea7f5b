"""All techniques of forms, alone and in pairs: the values of the step, or an error that says what is missing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from msgspec import structs

from autopar.api.steps import as_one_stage
from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.frontend import Traced
from autopar.lower.techniques import FIRST, TECHNIQUES
from autopar.plan import StepForm
from autopar.plan import form as named
from autopar.sharding.padding import candidates
from examples import gpt
from tests.end_to_end.compare import difference
from tests.lower.test_backward_update import model
from tests.microbatch.running import run, step_of, traced

FIELDS = tuple(t.field for t in (*FIRST, *TECHNIQUES))
PAIRS = tuple(itertools.combinations(FIELDS, 2))


def text() -> tuple[Any, Any]:
    """A GPT in a loop over layers, with a vocabulary that two devices do not divide."""
    sizes = {"layers": 4, "hidden": 8, "heads": 2, "vocab": 15, "seq": 4, "batch": 4}
    return gpt.build("tiny", scan=True, remat=True, clip=None, dtype="float64", **sizes)


def stacks() -> tuple[Any, Any]:
    """Layers in a loop, without attention, with Adam."""
    return model(optax.adam(1e-2, eps=1e-4), layers=4, remat=False)


def flat() -> tuple[Any, Any]:
    """Two layers that no loop has, of which two devices divide no dim but the batch."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    p = [0.3 * jax.random.normal(k, (15, 15), jnp.float64) for k in keys[:2]]
    return step_of(loss), (p, jax.random.normal(keys[2], (4, 15), jnp.float64))


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = MappingProxyType({"text": text, "stacks": stacks, "flat": flat})


#: By model the techniques that have nothing to change in it.
ALONE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "text": frozenset(),
        "stacks": frozenset({"block_scores"}),
        "flat": frozenset({"backward_update", "segment_layers", "layered_update", "block_scores"}),
    }
)
#: Pairs that do not compose, with the one that is refused: an update in the backward loop cannot wait for gradients of
#: other microbatches, and gradients that segments leave are no rows of one loop.
APART: Mapping[tuple[str, str], str] = MappingProxyType(
    {("backward_update", "microbatches"): "microbatches", ("segment_layers", "layered_update"): "layered_update"}
)


@cache
def made(name: str) -> tuple[Traced, list[Any], list[Any]]:
    """A traced model, its arguments, and what it returns."""
    step, args = MODELS[name]()
    found, leaves = traced(step, args)
    return found, leaves, jax.tree.leaves(jax.jit(step)(*args))


def value_of(field: str, found: Traced) -> Any:
    """What a form has in a field whose technique it takes."""
    if field == "padded":
        ways = candidates(found.graph, 2, 0.5)
        return tuple(d for c in ways[:1] for d in c.dims(found.graph)) or (("nothing", 0, 16),)
    return {
        "remat": "full",
        "backward_update": True,
        "segment_layers": 2,
        "layered_update": True,
        "microbatches": 2,
        "block_scores": 1,
    }[field]


def outcome(name: str, fields: tuple[str, ...]) -> str:
    """ "composes", with the values of the step, or the field that finds nothing to change."""
    found, leaves, wanted = made(name)
    form = StepForm(**{field: value_of(field, found) for field in fields})
    try:
        formed, has = as_one_stage(found, 2, form)
    except MicrobatchError:
        return "microbatches"
    except InfeasiblePlanError as error:
        return next(t.field for t in (*FIRST, *TECHNIQUES) if error.cause == f"there is no {t.wants}")
    assert formed is not found and structs.replace(has, layer_ends=None) == form
    for a, b in zip(run(formed, leaves), wanted, strict=True):
        assert difference(np.asarray(a), np.asarray(b)) < 1e-10
    return "composes"


def expected(name: str, pair: tuple[str, ...]) -> str:
    """As `outcome` by `ALONE` and `APART`."""
    return next((f for f in pair if f in ALONE[name]), APART.get((pair[0], pair[-1]), "composes"))


@pytest.mark.few(3)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ["flat", "stacks", pytest.param("text", marks=pytest.mark.slow)])
def test_alone(x64: None, name: str, field: str) -> None:
    assert outcome(name, (field,)) == expected(name, (field,))


@pytest.mark.few(4)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", ["flat", "stacks", pytest.param("text", marks=pytest.mark.slow)])
def test_in_pairs(x64: None, name: str, pair: tuple[str, str]) -> None:
    assert outcome(name, pair) == expected(name, pair)


def test_every_technique_has_a_name_and_a_rewriting(x64: None) -> None:
    """But for what hosts update, which changes no graph; a form without techniques is the step itself."""
    assert {t.field for t in named.TECHNIQUES} == {*FIELDS, "host_update"}
    assert not StepForm().words and {t.name_in(StepForm()) for t in named.TECHNIQUES} == {""}
    form = StepForm(2, "full", segment_layers=3)
    assert form.words == ("in 2 microbatches", "with remat='full'", "in segments of 3 layers")
    found, _, _ = made("flat")
    assert as_one_stage(found, 1, StepForm())[0] is found


def test_an_error_says_what_is_missing(x64: None) -> None:
    found, _, _ = made("flat")
    with pytest.raises(InfeasiblePlanError, match="in segments of 2 layers") as error:
        as_one_stage(found, 1, StepForm(segment_layers=2))
    assert "pair of loops over layers" in str(error.value)


def test_a_technique_that_changes_nothing_is_no_part_of_the_form(x64: None) -> None:
    """A user's own recomputation leaves nothing to recompute, and a batch of which nothing is read makes no loop."""

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda p: jnp.mean(jnp.tanh(p) ** 2))(p)

    found, _ = traced(step_of(loss), (jnp.ones((16, 16)), jnp.ones((4, 15))))
    for form in (StepForm(remat="full"), StepForm(2), StepForm(2, "full")):
        formed, made_form = as_one_stage(found, 2, form)
        assert formed is found and made_form == StepForm()
